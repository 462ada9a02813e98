//! How even work is in each layout, and how many keys and values the busiest rank receives: a table, and a check of what balanced
//! layouts promise.
//!
//! `cargo bench -p burn-cp-benches --bench balance -- --seeds 100`

use std::{process::ExitCode, sync::Arc, time::Instant};

use burn_cp::{
    layout::{Documents, LayoutPolicy, Visibility, least_kv_received},
    plan::{AttentionPlan, MaskKind},
};
use burn_cp_benches::log_normal_lengths;
use clap::Parser;

#[derive(Debug, Parser)]
#[command(about = "Balance and K/V received of layouts over random documents")]
struct Args {
    /// Packs of each kind of documents
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// Tokens of a pack
    #[arg(long, default_value_t = 65_536)]
    tokens: usize,
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_values_t = [2, 3, 4, 8, 16, 32, 64])]
    ranks: Vec<usize>,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// A name for documents and their lengths by seed and number of tokens.
type Kind = (&'static str, fn(u64, usize) -> Vec<usize>);

const KINDS: [Kind; 5] = [
    ("median 1K", |seed, tokens| {
        log_normal_lengths(seed, 1024.0, tokens)
    }),
    ("median 4K", |seed, tokens| {
        log_normal_lengths(seed, 4096.0, tokens)
    }),
    ("half + short", |seed, tokens| {
        let mut lengths = vec![tokens / 2];
        lengths.extend(log_normal_lengths(seed, 512.0, tokens - tokens / 2));
        lengths
    }),
    ("single", |_, tokens| vec![tokens]),
    ("median 64", |seed, tokens| {
        log_normal_lengths(seed, 64.0, tokens)
    }),
];

/// What one layout of one pack gives.
struct Figures {
    balance: f64,
    kv_fraction: f64,
    bound: f64,
    /// Most tokens of a rank over the mean.
    tokens: f64,
    layout_ms: f64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    println!(
        "{} packs of {} tokens; documents log-normal, sigma 1.2; causal\n\n\
         documents     ranks  layout           balance mean least  kv_fraction mean  most  bound mean  tokens most  layout ms  over",
        args.seeds, args.tokens
    );
    let mut broken = Vec::new();
    for (name, lengths) in KINDS {
        for &ranks in &args.ranks {
            for (layout, policy) in policies(name, ranks) {
                let figures: Vec<_> = (0..args.seeds)
                    .map(|seed| measure(&lengths(seed, args.tokens), &policy, ranks))
                    .collect();
                let over = row((name, ranks, layout), &figures);
                let promised = layout == "balanced";
                let least = figures
                    .iter()
                    .map(|figures| figures.balance)
                    .fold(1.0, f64::min);
                if promised && least < 0.95 {
                    broken.push(format!("{name}, {ranks} ranks: balance {least:.3}"));
                }
                if promised && name == "median 1K" && ranks == 8 && over > 0 {
                    broken.push(format!(
                        "{name}, {ranks} ranks: {over} packs over max(0.30, 1.2 bound)"
                    ));
                }
            }
        }
    }
    println!(
        "\nover: packs whose kv_fraction is above max(0.30, 1.2 bound). The bound is one for balanced layouts."
    );
    if broken.is_empty() {
        println!(
            "Balanced: balance at least 0.95 everywhere, and no pack over at 8 ranks and median 1K."
        );
        return ExitCode::SUCCESS;
    }
    println!("broken: {}", broken.join("; "));
    ExitCode::FAILURE
}

/// All policies at 8 ranks and median 1K, only the balanced one elsewhere.
fn policies(name: &str, ranks: usize) -> Vec<(&'static str, LayoutPolicy)> {
    let visibility = Visibility::default();
    let balanced = ("balanced", LayoutPolicy::Balanced { visibility });
    if name != "median 1K" || ranks != 8 {
        return vec![balanced];
    }
    vec![
        ("contiguous", LayoutPolicy::Contiguous { multiple: 1 }),
        ("head-tail", LayoutPolicy::HeadTail),
        ("dual-chunk-swap", LayoutPolicy::DualChunkSwap),
        balanced,
    ]
}

fn measure(lengths: &[usize], policy: &LayoutPolicy, ranks: usize) -> Figures {
    let num_tokens = lengths.iter().sum();
    let documents = Documents::from_lengths(&[lengths.to_vec()], num_tokens)
        .expect("documents that fill their row");
    let least = least_kv_received(&documents, ranks, Visibility::default()).expect("a bound");
    let documents = match policy {
        LayoutPolicy::DualChunkSwap => documents
            .aligned(2 * ranks)
            .expect("aligned documents")
            .documents
            .flattened(),
        _ => documents,
    };
    let start = Instant::now();
    let layout = policy.layout(&documents, ranks).expect("a layout");
    let layout_ms = start.elapsed().as_secs_f64() * 1e3;
    let most = (0..ranks)
        .map(|rank| layout.local_len(rank))
        .max()
        .unwrap_or(0);
    let tokens = most as f64 * ranks as f64 / layout.seq_len() as f64;
    let documents = documents.padded_to(layout.seq_len()).expect("padding");
    let plan = AttentionPlan::new(Arc::new(documents), Arc::new(layout), MaskKind::CAUSAL)
        .expect("a plan");
    Figures {
        balance: plan.balance(),
        kv_fraction: plan.kv_fraction(),
        bound: plan.fraction_of_others(least),
        tokens,
        layout_ms,
    }
}

/// Prints a row and returns how many packs are over.
fn row((name, ranks, layout): (&str, usize, &str), figures: &[Figures]) -> usize {
    let mean =
        |value: fn(&Figures) -> f64| figures.iter().map(value).sum::<f64>() / figures.len() as f64;
    let most = |value: fn(&Figures) -> f64| figures.iter().map(value).fold(0.0, f64::max);
    let least = figures
        .iter()
        .map(|figures| figures.balance)
        .fold(1.0, f64::min);
    let over = figures
        .iter()
        .filter(|figures| figures.kv_fraction > (1.2 * figures.bound).max(0.30))
        .count();
    println!(
        "{name:<12}  {ranks:>5}  {layout:<15}  {:>12.3} {least:>5.3}  {:>16.3} {:>5.3}  {:>10.3}  {:>11.3}  {:>9.2}  {over:>4}",
        mean(|figures| figures.balance),
        mean(|figures| figures.kv_fraction),
        most(|figures| figures.kv_fraction),
        mean(|figures| figures.bound),
        most(|figures| figures.tokens),
        mean(|figures| figures.layout_ms),
    );
    over
}
