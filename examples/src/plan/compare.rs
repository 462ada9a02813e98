//! What each layout with each exchange costs.

use std::{borrow::Borrow, sync::Arc};

use burn_cp::{
    layout::{Documents, Visibility, least_kv_received},
    plan::{AttentionPlan, CostShape, ExchangeStrategy, Hardware, MaskKind},
};
use serde::Serialize;

use super::{ExchangeArg, LayoutArg, PlanArgs, PlanCommandError};

/// One layout with one exchange: an object of the JSON array.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// The layout.
    pub layout: &'static str,
    /// The exchange.
    pub exchange: &'static str,
    /// Mean work over the most; over several packs weighted by work.
    pub balance: Option<f64>,
    /// Most K/V tokens that a rank needs of others, over S - S/W; of the worst pack.
    pub kv_fraction: Option<f64>,
    /// What it is at least in a balanced layout; of the worst pack.
    pub kv_fraction_bound: f64,
    /// Milliseconds of an attention layer forward and backward, until the last rank has finished; over all packs.
    pub predicted_ms: Option<f64>,
    /// By rank; empty if impossible.
    pub ranks: Vec<RankOutcome>,
    /// Whether no other combination is faster.
    pub winner: bool,
    /// Why it cannot be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub impossible: Option<String>,
}

/// What one rank does, summed over packs.
#[derive(Debug, Clone, Default, Serialize)]
pub struct RankOutcome {
    /// Real tokens.
    pub tokens: usize,
    /// Visible pairs of one head.
    pub area: u64,
    /// Bytes received in a forward pass.
    pub bytes_in: u64,
    /// Bytes sent in a forward pass.
    pub bytes_out: u64,
    /// Bytes held besides the shard, for the largest pack.
    pub memory_bytes: u64,
    /// Milliseconds of arithmetic, forward and backward.
    pub compute_ms: f64,
    /// Milliseconds in which the link is busy, forward and backward.
    pub transfer_ms: f64,
    /// Milliseconds in all.
    pub predicted_ms: f64,
}

/// All combinations, and what the picture needs.
#[derive(Debug)]
pub struct Comparison {
    /// By layout, then by exchange.
    pub outcomes: Vec<Outcome>,
    /// The plans of the first pack, by layout; none where there is none.
    pub plans: Vec<(LayoutArg, Option<AttentionPlan>)>,
    /// Packs, documents and tokens.
    pub size: [usize; 3],
    /// Ranks.
    pub world_size: usize,
}

/// Plans every pack in every layout, and predicts every exchange.
///
/// # Errors
/// Flags that are refused, files that cannot be read, documents that no plan can be made for.
pub fn compare(args: &PlanArgs, world_size: usize) -> Result<Comparison, PlanCommandError> {
    args.validate()?;
    if !(1..=1024).contains(&world_size) {
        return Err(PlanCommandError::Flag {
            flag: "ranks",
            expected: "a number from 1 to 1024",
            got: world_size.to_string(),
        });
    }
    let packs = args.packs()?;
    let bound = bound(&packs, world_size, args.mask())?;
    let mut outcomes = Vec::new();
    let mut plans = Vec::new();
    for layout in args.layouts() {
        let planned: Result<Vec<_>, _> = (packs.iter())
            .map(|pack| plan(pack, layout, world_size, args.mask()))
            .collect();
        for exchange in args.exchanges() {
            let result = match &planned {
                Ok(plans) => sum(plans, exchange.strategy(), &args.shape(), &args.hardware()),
                Err(error) => Err(error.to_string()),
            };
            let layouts = planned.as_deref().unwrap_or_default();
            outcomes.push(outcome((layout, exchange), layouts, bound, result));
        }
        plans.push((
            layout,
            planned.ok().and_then(|plans| plans.into_iter().next()),
        ));
    }
    if let Some(best) = fastest(outcomes.iter_mut()) {
        best.winner = true;
    }
    Ok(Comparison {
        outcomes,
        plans,
        size: [
            packs.len(),
            packs.iter().map(Vec::len).sum(),
            packs.iter().flatten().sum(),
        ],
        world_size,
    })
}

/// The possible outcome that is predicted to end first; of several the one whose busiest rank receives least.
pub(super) fn fastest<O: Borrow<Outcome>>(outcomes: impl Iterator<Item = O>) -> Option<O> {
    let possible = outcomes.filter(|outcome| outcome.borrow().predicted_ms.is_some());
    let cost = |outcome: &O| {
        let Outcome {
            predicted_ms,
            ranks,
            ..
        } = outcome.borrow();
        let busiest = ranks.iter().map(|rank| rank.bytes_in).max();
        (predicted_ms.unwrap_or(f64::INFINITY), busiest)
    };
    possible.min_by(|a, b| {
        let (a, b) = (cost(a), cost(b));
        a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
    })
}

fn documents(pack: &[usize]) -> Result<Documents, PlanCommandError> {
    Ok(Documents::from_lengths(
        &[pack.to_vec()],
        pack.iter().sum(),
    )?)
}

fn bound(packs: &[Vec<usize>], world_size: usize, mask: MaskKind) -> Result<f64, PlanCommandError> {
    let mut worst: f64 = 0.0;
    for pack in packs {
        let documents = documents(pack)?;
        let least = least_kv_received(&documents, world_size, Visibility::from(mask))?;
        let tokens = documents.seq_len() as f64;
        if world_size > 1 {
            worst = worst.max(least as f64 / (tokens - tokens / world_size as f64));
        }
    }
    Ok(worst)
}

fn plan(
    pack: &[usize],
    layout: LayoutArg,
    world_size: usize,
    mask: MaskKind,
) -> Result<AttentionPlan, PlanCommandError> {
    let mut documents = documents(pack)?;
    if layout == LayoutArg::DualChunkSwap {
        documents = documents.aligned(2 * world_size)?.documents.flattened();
    }
    let layout = layout.policy(mask).layout(&documents, world_size)?;
    let documents = documents.padded_to(layout.seq_len())?;
    Ok(AttentionPlan::new(
        Arc::new(documents),
        Arc::new(layout),
        mask,
    )?)
}

/// Ranks and time over all packs; packs come one after the other, and the last rank of each counts.
fn sum(
    plans: &[AttentionPlan],
    strategy: ExchangeStrategy,
    shape: &CostShape,
    hardware: &Hardware,
) -> Result<(Vec<RankOutcome>, f64), String> {
    let world_size = plans.first().map_or(0, AttentionPlan::world_size);
    let mut ranks = vec![RankOutcome::default(); world_size];
    let mut predicted_ms = 0.0;
    for plan in plans {
        let cost = plan
            .predict(strategy, shape, hardware)
            .map_err(|error| error.to_string())?;
        predicted_ms += cost.predicted_ms;
        for (sum, cost) in ranks.iter_mut().zip(&cost.ranks) {
            sum.tokens += cost.tokens;
            sum.area = sum.area.saturating_add(cost.area);
            sum.bytes_in = sum.bytes_in.saturating_add(cost.bytes.received);
            sum.bytes_out = sum.bytes_out.saturating_add(cost.bytes.sent);
            sum.memory_bytes = sum.memory_bytes.max(cost.buffer_bytes);
            sum.compute_ms += cost.compute_ms;
            sum.transfer_ms += cost.transfer_ms;
            sum.predicted_ms += cost.predicted_ms;
        }
    }
    Ok((ranks, predicted_ms))
}

fn outcome(
    (layout, exchange): (LayoutArg, ExchangeArg),
    plans: &[AttentionPlan],
    kv_fraction_bound: f64,
    result: Result<(Vec<RankOutcome>, f64), String>,
) -> Outcome {
    let most =
        |plan: &AttentionPlan| plan.ranks().iter().map(|rank| rank.area).max().unwrap_or(0) as f64;
    let mean = |plan: &AttentionPlan| plan.total_area() as f64 / plan.world_size() as f64;
    let (mean, most): (f64, f64) = (plans.iter().map(mean).sum(), plans.iter().map(most).sum());
    let balance = if most > 0.0 { mean / most } else { 1.0 };
    let known = !plans.is_empty();
    let (ranks, predicted_ms, impossible) = match result {
        Ok((ranks, predicted_ms)) => (ranks, Some(predicted_ms), None),
        Err(reason) => (Vec::new(), None, Some(reason)),
    };
    Outcome {
        layout: layout.name(),
        exchange: exchange.name(),
        balance: known.then_some(balance),
        kv_fraction: known.then(|| {
            plans
                .iter()
                .map(AttentionPlan::kv_fraction)
                .fold(0.0, f64::max)
        }),
        kv_fraction_bound,
        predicted_ms,
        ranks,
        winner: false,
        impossible,
    }
}
