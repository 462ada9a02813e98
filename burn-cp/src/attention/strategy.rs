//! Which strategy a call takes, and which it cannot.

use crate::plan::{AttentionPlan, CostShape, ExchangeStrategy, Hardware, PlanError};

/// The strategy that attention of these sizes takes where `asked` was asked for: `asked` itself, or, for
/// [`ExchangeStrategy::Auto`], the one that the cost model predicts to be fastest on GPUs of [`Hardware`]'s default figures. Pure host;
/// equal on all ranks.
///
/// # Errors
/// The strategy cannot serve the plan, or these heads.
pub fn resolve(
    plan: &AttentionPlan,
    asked: ExchangeStrategy,
    overlap: bool,
    shape: &CostShape,
) -> Result<ExchangeStrategy, PlanError> {
    let strategy = match asked {
        ExchangeStrategy::Auto => {
            let hardware = Hardware {
                overlap,
                ..Hardware::default()
            };
            plan.choose(shape, &hardware)
        }
        named => named,
    };
    plan.check_strategy(strategy, shape)?;
    Ok(strategy)
}
