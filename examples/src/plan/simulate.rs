//! The same for many worlds.

use std::fmt::Write as _;

use clap::Args;
use serde::Serialize;

use super::{Outcome, PlanArgs, PlanCommandError, compare, compare::fastest, to_json};

/// Flags of `simulate`.
#[derive(Debug, Clone, Args)]
pub struct SimulateArgs {
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_values_t = [8, 16, 32, 64, 128, 256, 512, 1024])]
    pub ranks: Vec<usize>,
    /// What is planned.
    #[command(flatten)]
    pub plan: PlanArgs,
}

/// An object of the JSON array.
#[derive(Serialize)]
struct WorldOutcome<'a> {
    world_size: usize,
    #[serde(flatten)]
    outcome: &'a Outcome,
}

/// What `simulate` prints: for each world every layout with its fastest exchange; as JSON every combination.
///
/// # Errors
/// Flags and files that are refused.
pub fn simulate(args: &SimulateArgs) -> Result<String, PlanCommandError> {
    if args.plan.svg.is_some() {
        return Err(PlanCommandError::Flag {
            flag: "svg",
            expected: "none with simulate, which draws nothing",
            got: "a file".to_owned(),
        });
    }
    let mut comparisons = Vec::new();
    for &ranks in &args.ranks {
        comparisons.push(compare(&args.plan, ranks)?);
    }
    let outcomes = || {
        comparisons.iter().flat_map(|comparison| {
            let world_size = comparison.world_size;
            comparison.outcomes.iter().map(move |outcome| WorldOutcome {
                world_size,
                outcome,
            })
        })
    };
    if args.plan.json {
        return to_json(&outcomes().collect::<Vec<_>>());
    }
    let mut text = String::from(
        " ranks  layout           fastest exchange  balance  K/V received  at least  busiest in  predicted\n",
    );
    for comparison in &comparisons {
        for layout in args.plan.layouts() {
            let of_layout = comparison
                .outcomes
                .iter()
                .filter(|outcome| outcome.layout == layout.name());
            let world_size = comparison.world_size;
            match fastest(of_layout.clone()) {
                Some(best) => line(&mut text, world_size, best),
                None => {
                    let reason = of_layout
                        .filter_map(|outcome| outcome.impossible.as_deref())
                        .next();
                    let reason = reason.unwrap_or("no exchange was asked for");
                    let _ = writeln!(
                        text,
                        "{world_size:>6}  {:<15}  impossible: {reason}",
                        layout.name()
                    );
                }
            }
        }
    }
    text.push_str("* the fastest of its world\n");
    Ok(text)
}

fn line(text: &mut String, world_size: usize, best: &Outcome) {
    let bytes_in = best
        .ranks
        .iter()
        .map(|rank| rank.bytes_in)
        .max()
        .unwrap_or(0);
    let _ = writeln!(
        text,
        "{world_size:>6}  {:<15}  {:<16}  {:>7.3}  {:>12.3}  {:>8.3}  {:>10}  {:>7.3} ms{}",
        best.layout,
        best.exchange,
        best.balance.unwrap_or(f64::NAN),
        best.kv_fraction.unwrap_or(f64::NAN),
        best.kv_fraction_bound,
        super::text::bytes(bytes_in),
        best.predicted_ms.unwrap_or(f64::NAN),
        if best.winner { " *" } else { "" }
    );
}
