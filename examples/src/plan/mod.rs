//! The command `plan`: what attention over some documents will cost with each layout and exchange, before a device is touched.
//!
//! [`PlanArgs`] are the flags, [`run_plan`] and [`simulate`] the two commands; [`compare`] computes, `text` and
//! [`draw`] show. Everything is host arithmetic over `burn_cp`'s layouts, plans and cost model.

mod args;
mod compare;
mod error;
mod picture;
mod scene;
mod simulate;
mod text;

use std::fmt::Write as _;

pub use args::{DtypeArg, ExchangeArg, LayoutArg, MaskArg, PlanArgs};
pub use compare::{Comparison, Outcome, RankOutcome, compare};
pub use error::PlanCommandError;
pub use picture::draw;
pub use simulate::{SimulateArgs, simulate};

/// What `plan` prints. Writes the picture, where one is asked for.
///
/// # Errors
/// Flags and files that are refused; a picture that cannot be written.
pub fn run_plan(args: &PlanArgs, ranks: usize) -> Result<String, PlanCommandError> {
    let comparison = compare(args, ranks)?;
    if let Some(path) = &args.svg {
        draw(&comparison, path)?;
    }
    if args.json {
        return to_json(&comparison.outcomes);
    }
    let mut text = String::new();
    text::show(&comparison, args, &mut text);
    if let Some(path) = &args.svg {
        let _ = writeln!(text, "\nwrote {}", path.display());
    }
    Ok(text)
}

fn to_json(value: &impl serde::Serialize) -> Result<String, PlanCommandError> {
    let mut text =
        serde_json::to_string_pretty(value).map_err(|source| PlanCommandError::Json { source })?;
    text.push('\n');
    Ok(text)
}
