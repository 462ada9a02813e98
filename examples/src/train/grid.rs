//! Every way of running one training, each against one rank.

use std::collections::{HashMap, HashSet, hash_map::Entry};

use burn_cp::launch::LaunchError;
use clap::ValueEnum;

use super::{
    Checkpointing, Device, Exchange, Layout, ModelSize, Outcome, TrainConfig, Vision, max_rel_diff,
    max_rel_grad_diff, product_rounding, train_on_device,
};

/// Largest relative difference of the loss from one rank's that a case may show, in `f32` over twenty steps.
pub const LOSS_TOLERANCE: f64 = 1e-4;
/// Largest relative difference of a parameter's gradient from one rank's at step 0, in `f32`, on a device whose products keep all bits
/// of their inputs. On others it is what they round by: a difference in an input's last bit may move it to its neighbour.
pub const GRADIENT_TOLERANCE: f64 = 1e-5;

/// One way of running the training.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// The run.
    pub config: TrainConfig,
}

/// How a case compares to one rank.
#[derive(Debug, Clone)]
pub struct CaseResult {
    /// The case.
    pub case: Case,
    /// Largest relative difference of the loss.
    pub loss: f64,
    /// Largest relative difference of a gradient at step 0.
    pub gradient: f64,
    /// The largest that it may be.
    pub gradient_tolerance: f64,
    /// Frames that each rank encoded.
    pub frames: Vec<u64>,
    /// K/V tokens that each rank received.
    pub kv_tokens: Vec<u64>,
}

impl Case {
    /// A name that lists what the case is made of.
    pub fn name(&self) -> String {
        let config = &self.config;
        format!(
            "dp{} x cp{} {:?} {:?} {:?} {} {:?}",
            config.dp,
            config.ranks / config.dp.max(1),
            config.layout,
            config.exchange,
            config.vision,
            if config.freeze_vision {
                "frozen"
            } else {
                "trained"
            },
            config.checkpointing
        )
    }

    /// The value of each factor, by index.
    fn factors(&self) -> [usize; 6] {
        let config = &self.config;
        [
            2 * (config.dp - 1) + config.ranks / 4,
            config.layout as usize,
            config.exchange as usize,
            config.vision as usize,
            usize::from(config.freeze_vision),
            config.checkpointing as usize,
        ]
    }
}

impl CaseResult {
    /// Why the case is not as it should be; `None` where it is.
    pub fn fault(&self) -> Option<String> {
        if self.loss.is_nan() || self.loss > LOSS_TOLERANCE {
            return Some(format!(
                "loss differs by {:.1e}, more than {LOSS_TOLERANCE:.0e}",
                self.loss
            ));
        }
        if self.gradient.is_nan() || self.gradient > self.gradient_tolerance {
            return Some(format!(
                "a gradient differs by {:.1e}, more than {:.0e}",
                self.gradient, self.gradient_tolerance
            ));
        }
        if self.case.config.vision == Vision::Sharded && self.frames.contains(&0) {
            return Some(format!("a rank encoded no frame: {:?}", self.frames));
        }
        let cp = self.case.config.ranks / self.case.config.dp.max(1);
        // A balanced layout may keep every document whole.
        let must_move = cp > 1 && self.case.config.layout != Layout::Balanced;
        if must_move && self.kv_tokens.iter().all(|&tokens| tokens == 0) {
            return Some("no rank received a K/V token".to_owned());
        }
        None
    }
}

/// The whole grid: 2 and 4 ranks and dp 2 × cp 2, four layouts, both exchanges and vision settings, frozen and trained tower, both
/// checkpointing strategies.
pub fn full(steps: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for (ranks, dp) in [(2, 1), (4, 1), (4, 2)] {
        for layout in Layout::value_variants().iter().copied() {
            for exchange in [Exchange::AllGather, Exchange::NeededOnly] {
                for vision in [Vision::Replicated, Vision::Sharded] {
                    for freeze_vision in [false, true] {
                        for checkpointing in [Checkpointing::None, Checkpointing::Balanced] {
                            let size = ModelSize::Tiny;
                            let base = TrainConfig::default();
                            let config = TrainConfig {
                                ranks,
                                dp,
                                layout,
                                exchange,
                                vision,
                                freeze_vision,
                                checkpointing,
                                steps,
                                size,
                                tokens: 256,
                                heldout_packs: 1,
                                ..base
                            };
                            cases.push(Case { config });
                        }
                    }
                }
            }
        }
    }
    cases
}

/// A subset of the grid in which every two values of two factors meet in some case.
pub fn pairwise(steps: u64) -> Vec<Case> {
    let cases = full(steps);
    let pairs = |case: &Case| {
        let factors = case.factors();
        let mut pairs = Vec::new();
        for i in 0..factors.len() {
            for j in i + 1..factors.len() {
                pairs.push((i, factors[i], j, factors[j]));
            }
        }
        pairs
    };
    let mut open: HashSet<_> = cases.iter().flat_map(pairs).collect();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        let gain = |case: &&Case| {
            pairs(case)
                .iter()
                .filter(|pair| open.contains(pair))
                .count()
        };
        // The last of equals, so that the choice does not depend on hashing.
        let Some(best) = cases.iter().max_by_key(gain) else {
            break;
        };
        for pair in pairs(best) {
            open.remove(&pair);
        }
        chosen.push(best.clone());
    }
    chosen
}

/// Runs cases one after the other, each against one rank with the same start, and hands every result to `seen`.
///
/// # Errors
/// The first failure of a world.
pub fn run_cases(
    cases: &[Case],
    mut seen: impl FnMut(&CaseResult),
) -> Result<Vec<CaseResult>, LaunchError> {
    // What one rank does depends on these two alone.
    let mut references: HashMap<(bool, usize), Outcome> = HashMap::new();
    let mut tolerances: HashMap<Device, f64> = HashMap::new();
    let mut results = Vec::with_capacity(cases.len());
    for case in cases {
        let key = (
            case.config.freeze_vision,
            case.config.checkpointing as usize,
        );
        let reference = match references.entry(key) {
            Entry::Occupied(reference) => reference.into_mut(),
            Entry::Vacant(slot) => slot.insert(train_on_device(
                &case.config.on_one_rank(),
                None,
                None,
                (false, true),
            )?),
        };
        let outcome = train_on_device(&case.config, None, None, (false, true))?;
        let device = case.config.device;
        let tolerance = *(tolerances.entry(device))
            .or_insert_with(|| product_rounding(device).max(GRADIENT_TOLERANCE));
        let empty = Vec::new();
        let result = CaseResult {
            case: case.clone(),
            loss: max_rel_diff(&outcome.losses, &reference.losses),
            gradient: max_rel_grad_diff(
                outcome.first_gradients.as_ref().unwrap_or(&empty),
                reference.first_gradients.as_ref().unwrap_or(&empty),
            ),
            gradient_tolerance: tolerance,
            frames: outcome.vision_frames_per_rank.clone(),
            kv_tokens: outcome.kv_tokens_received.clone(),
        };
        seen(&result);
        results.push(result);
    }
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_subset_is_small_and_meets_every_pair() {
        assert_eq!(full(20).len(), 192);
        let chosen = pairwise(20);
        assert!(chosen.len() <= 16, "{}", chosen.len());
        let pairs = |cases: &[Case]| -> HashSet<_> {
            let of = |case: &Case| {
                let f = case.factors();
                (0..6)
                    .flat_map(move |i| (i + 1..6).map(move |j| (i, f[i], j, f[j])))
                    .collect::<Vec<_>>()
            };
            cases.iter().flat_map(of).collect()
        };
        assert_eq!(pairs(&chosen), pairs(&full(20)));
    }
}
