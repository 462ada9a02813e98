//! Which token comes next.

use rand::{Rng, SeedableRng, rngs::StdRng};

/// How a token is chosen from logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0 takes the likeliest token always.
    pub temperature: f64,
    /// Only this many of the likeliest tokens; 0: all.
    pub top_k: usize,
    /// Only the likeliest tokens that have this probability together (Holtzman et al., "The Curious Case of Neural Text
    /// Degeneration", 2020).
    pub top_p: f64,
}

/// A value out of range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field}: expected {expected}, got {got}")]
pub struct SamplingError {
    /// The field.
    pub field: &'static str,
    /// What it may be.
    pub expected: &'static str,
    /// What it is.
    pub got: f64,
}

/// Chooses tokens; the same seed chooses the same ones.
#[derive(Debug)]
pub struct Chooser {
    sampling: Sampling,
    rng: StdRng,
}

impl Chooser {
    /// A chooser with a generator of its own.
    ///
    /// # Errors
    /// A negative temperature, or `top_p` outside of `(0, 1]`.
    pub fn new(sampling: Sampling, seed: u64) -> Result<Self, SamplingError> {
        let Sampling {
            temperature, top_p, ..
        } = sampling;
        if !(temperature.is_finite() && temperature >= 0.0) {
            let (field, expected) = ("temperature", "a number of at least 0");
            return Err(SamplingError {
                field,
                expected,
                got: temperature,
            });
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            let (field, expected) = ("top_p", "a number above 0, at most 1");
            return Err(SamplingError {
                field,
                expected,
                got: top_p,
            });
        }
        Ok(Self {
            sampling,
            rng: StdRng::seed_from_u64(seed),
        })
    }

    /// The next token's id by its logits; 0 if there are none.
    #[allow(clippy::cast_possible_wrap, reason = "an index of a vocabulary")]
    pub fn choose(&mut self, logits: &[f32]) -> i64 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        // Stable: of equal logits the first.
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let Some(&first) = order.first() else {
            return 0;
        };
        let Sampling {
            temperature,
            top_k,
            top_p,
        } = self.sampling;
        if temperature == 0.0 {
            return first as i64;
        }
        if top_k > 0 {
            order.truncate(top_k);
        }
        let weight = |&at: &usize| (f64::from(logits[at] - logits[first]) / temperature).exp();
        let weights: Vec<f64> = order.iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        let mut kept = 0.0;
        let mut num = 0;
        while num < weights.len() && kept < top_p * total {
            kept += weights[num];
            num += 1;
        }
        let mut left = self.rng.random::<f64>() * kept;
        for (&at, weight) in order[..num].iter().zip(&weights) {
            left -= weight;
            if left < 0.0 {
                return at as i64;
            }
        }
        order[num.saturating_sub(1)] as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 4] = [0.0, 2.0, 1.0, -3.0];

    fn chosen(sampling: Sampling) -> Vec<i64> {
        let mut chooser = Chooser::new(sampling, 3).unwrap();
        (0..4000).map(|_| chooser.choose(&LOGITS)).collect()
    }

    #[test]
    fn without_temperature_the_likeliest_is_taken() {
        let sampling = Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
        };
        assert!(chosen(sampling).iter().all(|&id| id == 1));
    }

    #[test]
    fn tokens_come_as_often_as_their_probability_says() {
        let sampling = Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
        };
        let drawn = chosen(sampling);
        let total: f64 = LOGITS.iter().map(|&logit| f64::from(logit).exp()).sum();
        for (id, &logit) in LOGITS.iter().enumerate() {
            let share = drawn.iter().filter(|&&other| other == id as i64).count() as f64
                / drawn.len() as f64;
            assert!(
                (share - f64::from(logit).exp() / total).abs() < 0.03,
                "{id}: {share}"
            );
        }
    }

    #[test]
    fn the_unlikely_are_left_out() {
        let few = chosen(Sampling {
            temperature: 1.0,
            top_k: 2,
            top_p: 1.0,
        });
        assert!(few.iter().all(|id| [1, 2].contains(id)) && few.contains(&2));
        let nucleus = chosen(Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 0.6,
        });
        assert!(nucleus.iter().all(|&id| id == 1));
        assert!(
            Chooser::new(
                Sampling {
                    temperature: 1.0,
                    top_k: 0,
                    top_p: 0.0
                },
                1
            )
            .is_err()
        );
    }
}
