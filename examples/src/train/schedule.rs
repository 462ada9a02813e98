//! Learning rate by step.

use super::TrainConfig;

/// Rises linearly over the warm-up, then falls along a half cosine to a tenth (Loshchilov and Hutter, SGDR, 2017).
pub(super) fn learning_rate(config: &TrainConfig, step: u64) -> f64 {
    #[allow(clippy::cast_precision_loss)]
    let (at, warmup, steps) = (
        step as f64 + 1.0,
        config.warmup_steps as f64,
        config.steps as f64,
    );
    if at <= warmup {
        return config.learning_rate * at / warmup;
    }
    let progress = (at - warmup) / (steps - warmup).max(1.0);
    let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
    config.learning_rate * (0.1 + 0.9 * cosine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_then_falls_to_a_tenth() {
        let config = TrainConfig {
            steps: 100,
            warmup_steps: 10,
            learning_rate: 1.0,
            ..TrainConfig::default()
        };
        let rates: Vec<f64> = (0..100).map(|step| learning_rate(&config, step)).collect();
        assert!((rates[0] - 0.1).abs() < 1e-12 && (rates[9] - 1.0).abs() < 1e-12);
        assert!(rates[..10].is_sorted() && rates[9..].is_sorted_by(|a, b| a >= b));
        assert!((rates[99] - 0.1).abs() < 1e-12);
    }
}
