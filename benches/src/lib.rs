//! Benchmarks of burn-cp; see `benches/`, and `results/` for what they gave where.

use burn_cp::layout::Documents;

/// `num_documents` documents whose lengths follow a fixed pseudo-random sequence between 1 and `2 · mean`, packed into one row.
///
/// # Panics
/// Never: the row is as long as the documents.
pub fn packed_documents(num_documents: usize, mean: usize) -> Documents {
    let mut state: u64 = 0x9E37_79B9_7F4A_7C15;
    let lengths: Vec<usize> = (0..num_documents)
        .map(|_| {
            // xorshift64 (Marsaglia, 2003): the same documents on every machine.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            1 + usize::try_from(state % (2 * mean as u64)).unwrap_or(mean)
        })
        .collect();
    let seq_len = lengths.iter().sum();
    Documents::from_lengths(&[lengths], seq_len).expect("documents that fill their row")
}

/// Documents of log-normal lengths (sigma 1.2) with this median, packed into one row of `seq_len` tokens; the last one is cut.
///
/// # Panics
/// Never: the row is as long as the documents.
pub fn log_normal_documents(seq_len: usize, median: usize) -> Documents {
    let mut state: u64 = 0x2545_F491_4F6C_DD1D;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    };
    let (mut lengths, mut left) = (Vec::new(), seq_len);
    while left > 0 {
        // Box and Muller, 1958.
        let normal = (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
        let len = (median as f64 * (1.2 * normal).exp()).round().max(1.0);
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "positive, and cut to the row"
        )]
        let len = (len as usize).min(left);
        lengths.push(len);
        left -= len;
    }
    Documents::from_lengths(&[lengths], seq_len).expect("documents that fill their row")
}
