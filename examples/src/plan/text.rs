//! Tables for a terminal.

use std::fmt::Write as _;

use super::{Comparison, MaskArg, Outcome, PlanArgs, RankOutcome};

/// Ranks that fit side by side; of more their extremes are shown.
const MAX_COLUMNS: usize = 8;

/// Writes everything; writing to a string cannot fail.
pub(super) fn show(comparison: &Comparison, args: &PlanArgs, text: &mut String) {
    head(comparison, args, text);
    for layout in args.layouts() {
        let outcomes: Vec<_> = comparison
            .outcomes
            .iter()
            .filter(|outcome| outcome.layout == layout.name())
            .collect();
        one_layout(&outcomes, text);
    }
    summary(&comparison.outcomes, text);
}

fn head(comparison: &Comparison, args: &PlanArgs, text: &mut String) {
    let [packs, documents, tokens] = comparison.size;
    let packs = if packs == 1 {
        String::new()
    } else {
        format!(" in {packs} packs")
    };
    let mask = match (args.mask, args.window) {
        (MaskArg::Full, _) => "full".to_owned(),
        (MaskArg::Causal, None) => "causal".to_owned(),
        (MaskArg::Causal, Some(window)) => format!("causal, window {window}"),
    };
    let _ = writeln!(
        text,
        "{documents} documents, {tokens} tokens{packs} on {} ranks; {mask}; {} heads, {} K/V heads of {} elements in {}",
        comparison.world_size,
        args.heads,
        args.kv_heads,
        args.head_dim,
        format!("{:?}", args.dtype).to_lowercase(),
    );
    let _ = writeln!(
        text,
        "one attention layer, forward and backward, at {} TFLOP/s and {} GB/s, {} us a message, {}; bytes of the forward pass",
        args.tflops,
        args.link_gbs,
        args.latency_us,
        if args.no_overlap {
            "no overlap"
        } else {
            "overlapped"
        },
    );
}

fn one_layout(outcomes: &[&Outcome], text: &mut String) {
    let Some(first) = outcomes.first() else {
        return;
    };
    let figures = match (first.balance, first.kv_fraction) {
        (Some(balance), Some(kv)) => format!(
            "balance {balance:.3}, K/V received {kv:.3} (at least {:.3} if balanced)",
            first.kv_fraction_bound
        ),
        _ => "no layout".to_owned(),
    };
    let _ = writeln!(text, "\n{}: {figures}", first.layout);
    if let Some(shown) = outcomes.iter().find(|outcome| !outcome.ranks.is_empty()) {
        let num = shown.ranks.len();
        let names: Vec<String> = match num <= MAX_COLUMNS {
            true => (0..num).map(|rank| format!("rank {rank}")).collect(),
            false => ["least", "mean", "most"].map(str::to_owned).to_vec(),
        };
        let _ = writeln!(text, "  {:<24}{}", "", columns(&names));
        row(
            text,
            "tokens",
            &shown.ranks,
            |rank| rank.tokens as f64,
            count,
        );
    }
    for outcome in outcomes {
        if let Some(reason) = &outcome.impossible {
            let _ = writeln!(text, "  {:<15} impossible: {reason}", outcome.exchange);
            continue;
        }
        let mark = if outcome.winner { "*" } else { " " };
        let _ = writeln!(
            text,
            "  {:<15}{mark}{:>9.4} ms",
            outcome.exchange,
            outcome.predicted_ms.unwrap_or(f64::NAN)
        );
        let ranks = &outcome.ranks;
        row(text, "area", ranks, |rank| rank.area as f64, count);
        row(
            text,
            "in",
            ranks,
            |rank| rank.bytes_in as f64,
            |value| bytes(value as u64),
        );
        row(
            text,
            "out",
            ranks,
            |rank| rank.bytes_out as f64,
            |value| bytes(value as u64),
        );
        row(
            text,
            "memory",
            ranks,
            |rank| rank.memory_bytes as f64,
            |value| bytes(value as u64),
        );
        row(
            text,
            "predicted ms",
            ranks,
            |rank| rank.predicted_ms,
            |value| format!("{value:.4}"),
        );
    }
}

fn row(
    text: &mut String,
    name: &str,
    ranks: &[RankOutcome],
    value: impl Fn(&RankOutcome) -> f64,
    show: impl Fn(f64) -> String,
) {
    let values: Vec<f64> = ranks.iter().map(value).collect();
    let shown = if values.len() <= MAX_COLUMNS {
        values
    } else {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(0.0, f64::max);
        vec![
            least,
            values.iter().sum::<f64>() / values.len() as f64,
            most,
        ]
    };
    let cells: Vec<String> = shown.into_iter().map(show).collect();
    let _ = writeln!(text, "    {name:<22}{}", columns(&cells));
}

fn columns(cells: &[String]) -> String {
    cells.iter().map(|cell| format!("{cell:>12}")).collect()
}

fn summary(outcomes: &[Outcome], text: &mut String) {
    let _ = writeln!(
        text,
        "\nlayout           exchange         balance  K/V received  busiest in  most memory  predicted"
    );
    for outcome in outcomes {
        let _ = write!(text, "{:<15}  {:<15}", outcome.layout, outcome.exchange);
        if let Some(reason) = &outcome.impossible {
            let _ = writeln!(text, "  impossible: {reason}");
            continue;
        }
        let most =
            |value: fn(&RankOutcome) -> u64| outcome.ranks.iter().map(value).max().unwrap_or(0);
        let _ = writeln!(
            text,
            "  {:>7.3}  {:>12.3}  {:>10}  {:>11}  {:>7.4} ms{}",
            outcome.balance.unwrap_or(f64::NAN),
            outcome.kv_fraction.unwrap_or(f64::NAN),
            bytes(most(|rank| rank.bytes_in)),
            bytes(most(|rank| rank.memory_bytes)),
            outcome.predicted_ms.unwrap_or(f64::NAN),
            if outcome.winner { "  * fastest" } else { "" },
        );
    }
}

fn count(value: f64) -> String {
    match value {
        value if value < 1e6 => format!("{value:.0}"),
        value if value < 1e9 => format!("{:.2}M", value / 1e6),
        value => format!("{:.2}G", value / 1e9),
    }
}

/// Bytes in powers of ten.
pub(super) fn bytes(value: u64) -> String {
    let value = value as f64;
    match value {
        value if value < 1e3 => format!("{value:.0} B"),
        value if value < 1e6 => format!("{:.1} kB", value / 1e3),
        value if value < 1e9 => format!("{:.1} MB", value / 1e6),
        value => format!("{:.2} GB", value / 1e9),
    }
}
