//! What a run leaves behind, and how far two runs are apart.

use super::Score;

/// Gradients of one step by parameter path.
pub(super) type NamedGradients = Vec<(String, Vec<f64>)>;

/// The result of one world's training, the same on every rank.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// `TokenLoss.global` of each step, from step 0.
    pub losses: Vec<f64>,
    /// Synchronised gradients of step 0, where they were asked for.
    pub first_gradients: Option<Vec<(String, Vec<f64>)>>,
    /// Held-out score of the last weights.
    pub heldout: Score,
    /// Real tokens trained per second.
    pub tokens_per_s: f64,
    /// Frames that each rank's vision tower encoded, over all steps.
    pub vision_frames_per_rank: Vec<u64>,
    /// K/V tokens that each rank received from others in the attention of one layer, over all steps.
    pub kv_tokens_received: Vec<u64>,
    /// SHA-256 over all parameters in module order, hexadecimal.
    pub parameters_sha256: String,
    /// Steps done; fewer than asked for where the run was interrupted.
    pub steps_done: u64,
}

/// The largest relative difference of two loss curves of one length.
pub fn max_rel_diff(losses: &[f64], reference: &[f64]) -> f64 {
    if losses.len() != reference.len() {
        return f64::INFINITY;
    }
    let differences = losses
        .iter()
        .zip(reference)
        .map(|(a, b)| relative((a - b).abs(), b.abs()));
    differences.fold(0.0, worse)
}

/// The largest relative difference of a parameter's gradient, normwise: ‖a − b‖ / ‖b‖.
pub fn max_rel_grad_diff(
    gradients: &[(String, Vec<f64>)],
    reference: &[(String, Vec<f64>)],
) -> f64 {
    if gradients.len() != reference.len() {
        return f64::INFINITY;
    }
    let differences = gradients
        .iter()
        .zip(reference)
        .map(|((path, a), (other, b))| {
            if path != other || a.len() != b.len() {
                return f64::INFINITY;
            }
            let norm = |values: &mut dyn Iterator<Item = f64>| {
                values.map(|value| value * value).sum::<f64>().sqrt()
            };
            let difference = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
            relative(difference, norm(&mut b.iter().copied()))
        });
    differences.fold(0.0, worse)
}

fn relative(difference: f64, reference: f64) -> f64 {
    if difference == 0.0 {
        0.0
    } else {
        difference / reference
    }
}

/// The larger one; a NaN stays.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        f64::NAN
    } else {
        a.max(b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_relative_and_nan_is_not_lost() {
        assert_eq!(max_rel_diff(&[1.0, 2.0], &[1.0, 4.0]), 0.5);
        assert!(max_rel_diff(&[1.0, f64::NAN], &[1.0, 4.0]).is_nan());
        assert_eq!(max_rel_diff(&[1.0], &[1.0, 2.0]), f64::INFINITY);
        let named = |values: &[f64]| vec![("w".to_owned(), values.to_vec())];
        assert_eq!(
            max_rel_grad_diff(&named(&[3.0, 4.0]), &named(&[3.0, 4.0])),
            0.0
        );
        assert_eq!(
            max_rel_grad_diff(&named(&[0.0, 1.0]), &named(&[0.0, 0.0])),
            f64::INFINITY
        );
        assert_eq!(max_rel_grad_diff(&named(&[0.0]), &named(&[0.0])), 0.0);
    }
}
