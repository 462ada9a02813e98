//! Dropout that does not depend on how a batch is sharded.
//!
//! Burn's `Dropout` draws from the device's stream of random numbers: ranks would drop alike where they are seeded alike, and
//! no seed gives the masks of one rank. Here a mask is a function of the step's seed, the layer, the token (document and
//! position in it) and the feature, so any number of ranks and any layout drop the same.

use burn::tensor::{Bool, ElementConversion, Int, Tensor, TensorData, backend::Backend};

use crate::{
    attention::{ContextParallelBackend, Dropout},
    layout::LocalRun,
    sharder::{CpStep, StepError},
};

/// Where in a model something is dropped; two places never share a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DropoutSite {
    /// Layer of the model.
    pub layer: u64,
    /// Place within the layer.
    pub place: u8,
}

impl DropoutSite {
    /// A place of a layer.
    #[must_use]
    pub const fn new(layer: u64, place: u8) -> Self {
        Self { layer, place }
    }
}

/// The dropout of one step on one rank: made once per forward pass, used by all layers.
///
/// It drops nothing on a backend without autodiff, as Burn's does.
#[derive(Debug, Clone)]
pub struct StepDropout {
    /// `None` where nothing is dropped.
    seed: Option<u64>,
    /// For each of the `batch · local_tokens` tokens what names it in every sharding.
    tokens: Vec<u64>,
}

impl StepDropout {
    /// The dropout of this rank's tokens, or none at all for `active = false`. Exchanges nothing.
    ///
    /// # Errors
    /// [`StepError::Missing`], the same on every rank: the backend has autodiff, something would be dropped, and the batch has no
    /// [`with_dropout_seed`](crate::batch::SequenceBatch::with_dropout_seed).
    pub fn new<B: ContextParallelBackend>(
        step: &CpStep<B>,
        active: bool,
    ) -> Result<Self, StepError> {
        if !active || !B::ad_enabled(step.device()) {
            return Ok(Self {
                seed: None,
                tokens: Vec::new(),
            });
        }
        let Some(seed) = step.dropout_seed() else {
            return Err(StepError::Missing {
                what: "dropout seed, which a model with dropout needs in training".into(),
                available: "none; give the batch a new one for each step, with_dropout_seed".into(),
            });
        };
        let local_len = step.local_len();
        // Padding is named by no document; what it drops is of no consequence.
        let mut tokens = vec![u64::MAX; step.batch_size() * local_len];
        for run in LocalRun::of_rank(step.documents(), step.layout(), step.group().rank()) {
            let at = run.row * local_len + run.local.start;
            for (i, token) in tokens[at..at + run.local.len()].iter_mut().enumerate() {
                *token = ((run.document as u64) << 32) ^ (run.position + i) as u64;
            }
        }
        Ok(Self {
            seed: Some(seed),
            tokens,
        })
    }

    /// Elements of `x [batch, local_tokens, features]` are set to 0 with probability `p` in `0..1`, the others divided by
    /// `1 - p`; same shape and dtype. No communication.
    ///
    /// # Panics
    /// `x` is not this rank's shard, or `p` is not at least 0 and less than 1.
    pub fn apply<B: Backend>(&self, x: Tensor<B, 3>, p: f64, site: DropoutSite) -> Tensor<B, 3> {
        assert!(
            (0.0..1.0).contains(&p),
            "dropout: p must be in 0..1, got {p}"
        );
        let Some(seed) = self.seed.filter(|_| p > 0.0) else {
            return x;
        };
        let [batch, tokens, features] = x.dims();
        assert_eq!(
            batch * tokens,
            self.tokens.len(),
            "dropout: batch · local_tokens"
        );
        let mask = self.mask::<B>(
            of_site(seed, site),
            p,
            [batch, tokens, features],
            &x.device(),
        );
        x.mask_fill(mask, 0.0).mul_scalar(1.0 / (1.0 - p))
    }

    /// Dropout of attention weights for the kernels: `None` where nothing is dropped.
    pub(super) fn of_attention(&self, p: f64, site: DropoutSite) -> Option<Dropout> {
        let seed = self.seed.filter(|_| p > 0.0)?;
        Some(Dropout::new(p, of_site(seed, site)))
    }

    /// True where an element is dropped.
    fn mask<B: Backend>(
        &self,
        seed: u64,
        p: f64,
        shape: [usize; 3],
        device: &B::Device,
    ) -> Tensor<B, 3, Bool> {
        let rows: Vec<u64> = self
            .tokens
            .iter()
            .map(|&token| mix(seed ^ mix(token)))
            .collect();
        let columns: Vec<u64> = (0..shape[2] as u64).map(|i| mix(!seed ^ mix(i))).collect();
        let words = |from: &[u64], shift: u32, dims: [usize; 3]| -> Tensor<B, 3, Int> {
            #[allow(clippy::cast_possible_wrap)]
            let values: Vec<i64> = from
                .iter()
                .map(|word| (word >> shift & 0xffff) as i64)
                .collect();
            Tensor::<B, 3, Int>::from_data(TensorData::new(values, dims), device).expand(shape)
        };
        let [row, column] = [[shape[0], shape[1], 1], [1, 1, shape[2]]];
        let row = |i: u32| words(&rows, 16 * i, row);
        let column = |i: u32| words(&columns, 16 * i, column);
        // A Feistel network on two words of 16 bits, so that no product leaves 31 bits and every integer dtype gives the same.
        let mut left = row(0).bitwise_xor(column(0));
        let mut right = row(1).bitwise_xor(column(1));
        for (i, factor) in ROUND_FACTORS.into_iter().enumerate() {
            let turned = (right.clone() * factor)
                .bitwise_right_shift_scalar(7_i64.elem())
                .bitwise_and_scalar(0xffff_i64.elem());
            left = left.bitwise_xor(turned);
            // The other halves of the keys come in when the first have been mixed.
            let key = match i {
                1 => Some(row(2)),
                2 => Some(column(2)),
                3 => Some(row(3)),
                _ => None,
            };
            if let Some(key) = key {
                left = left.bitwise_xor(key);
            }
            (left, right) = (right, left);
        }
        #[allow(clippy::cast_possible_truncation)]
        let threshold = (p * f64::from(1u32 << 31)) as i64;
        let value = left.bitwise_and_scalar(0x7fff_i64.elem()) * 0x1_0000 + right;
        value.lower_elem(threshold)
    }
}

/// Places within the layers of this room.
pub(super) mod places {
    pub(in crate::nn) const WEIGHTS: u8 = 0;
    pub(in crate::nn) const ATTENDED: u8 = 1;
    pub(in crate::nn) const INNER: u8 = 2;
    pub(in crate::nn) const OUTER: u8 = 3;
    pub(in crate::nn) const CROSS_WEIGHTS: u8 = 4;
    pub(in crate::nn) const CROSS_ATTENDED: u8 = 5;
}

/// Odd numbers below 2^15, so that their product with 16 bits fits 31.
const ROUND_FACTORS: [i32; 6] = [0x6A09, 0x5BE1, 0x4E35, 0x7F4B, 0x63D9, 0x58AD];

fn of_site(seed: u64, site: DropoutSite) -> u64 {
    mix(seed ^ mix(site.layer << 8 ^ u64::from(site.place)))
}

/// The output function of SplitMix64 (Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::backend::Flex;

    use super::*;

    const FEATURES: usize = 192;
    const TOKENS: usize = 300;

    fn mask(seed: u64, p: f64, site: DropoutSite) -> Vec<bool> {
        let dropout = StepDropout {
            seed: Some(seed),
            tokens: (0..TOKENS as u64).collect(),
        };
        let x = Tensor::<Flex, 3>::ones([1, TOKENS, FEATURES], &Default::default());
        let out = dropout.apply(x, p, site);
        let values: Vec<f64> = out.into_data().iter().collect();
        let kept = 1.0 / (1.0 - p);
        assert!(values.iter().all(|x| *x == 0.0 || (x - kept).abs() < 1e-6));
        values.iter().map(|x| *x == 0.0).collect()
    }

    #[test]
    fn elements_are_dropped_with_their_probability_and_independently() {
        let site = DropoutSite::new(0, 0);
        let share = |hits: usize| hits as f64 / (TOKENS * FEATURES) as f64;
        for p in [0.1, 0.3, 0.5] {
            let first = mask(7, p, site);
            let count = share(first.iter().filter(|dropped| **dropped).count());
            // Four standard deviations.
            let slack = 4.0 * (p * (1.0 - p) / (TOKENS * FEATURES) as f64).sqrt();
            assert!((count - p).abs() < slack, "{p}: {count}");
            let shifted = |by: usize| -> Vec<bool> {
                first[by..].iter().chain(&first[..by]).copied().collect()
            };
            let others = [
                mask(8, p, site),
                mask(7, p, DropoutSite::new(1, 0)),
                mask(7, p, DropoutSite::new(0, 1)),
                // The next features and the next tokens.
                shifted(1),
                shifted(2),
                shifted(16),
                shifted(FEATURES),
                shifted(2 * FEATURES),
            ];
            for (i, other) in others.iter().enumerate() {
                let both = share(first.iter().zip(other).filter(|(a, b)| **a && **b).count());
                let slack = 4.0 * (p * p / (TOKENS * FEATURES) as f64).sqrt();
                assert!((both - p * p).abs() < slack, "{p} {i}: {both}");
            }
        }
    }

    #[test]
    fn tokens_and_features_are_dropped_as_often_as_others() {
        let mask = mask(3, 0.5, DropoutSite::new(2, 1));
        let bound = |of: usize| 5.0 * (0.25 / of as f64).sqrt();
        for token in mask.chunks(FEATURES) {
            let share = token.iter().filter(|x| **x).count() as f64 / FEATURES as f64;
            assert!((share - 0.5).abs() < bound(FEATURES), "{share}");
        }
        for feature in 0..FEATURES {
            let dropped = mask.iter().skip(feature).step_by(FEATURES);
            let share = dropped.filter(|x| **x).count() as f64 / TOKENS as f64;
            assert!((share - 0.5).abs() < bound(TOKENS), "{share}");
        }
    }
}
