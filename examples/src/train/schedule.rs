//! Learning rate by step.

/// Rises linearly over the warm-up, then falls along a half cosine to a tenth (Loshchilov and Hutter, SGDR, 2017).
pub(crate) fn warmup_cosine(peak: f64, warmup: u64, steps: u64, step: u64) -> f64 {
    #[allow(clippy::cast_precision_loss)]
    let (at, warmup, steps) = (step as f64 + 1.0, warmup as f64, steps as f64);
    if at <= warmup {
        return peak * at / warmup;
    }
    let progress = (at - warmup) / (steps - warmup).max(1.0);
    let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
    peak * (0.1 + 0.9 * cosine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_then_falls_to_a_tenth() {
        let rates: Vec<f64> = (0..100)
            .map(|step| warmup_cosine(1.0, 10, 100, step))
            .collect();
        assert!((rates[0] - 0.1).abs() < 1e-12 && (rates[9] - 1.0).abs() < 1e-12);
        assert!(rates[..10].is_sorted() && rates[9..].is_sorted_by(|a, b| a >= b));
        assert!((rates[99] - 0.1).abs() < 1e-12);
    }
}
