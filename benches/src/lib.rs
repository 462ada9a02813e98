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
