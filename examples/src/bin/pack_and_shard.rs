//! Prints a packed batch, which rank owns which of its tokens, and what attention over it will move. No tensors, no training.

use std::{error::Error, ops::Range, process::ExitCode, sync::Arc};

use burn_cp::{
    layout::Documents,
    plan::{AttentionPlan, CostShape, MaskKind},
    vision::plan_frames,
};
use burn_cp_examples::{
    data::{Pack, Split, vocabulary},
    train::{Exchange, Layout, TrainConfig},
};
use clap::Parser;

/// Show how a pack of train-vlm is sharded.
#[derive(Debug, Parser)]
#[command(name = "pack-and-shard", version)]
struct Args {
    /// Ranks that share the pack
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Which rank owns which tokens
    #[arg(long, value_enum, default_value_t = Layout::HeadTail)]
    layout: Layout,
    /// How keys and values travel
    #[arg(long, value_enum, default_value_t = Exchange::NeededOnly)]
    exchange: Exchange,
    /// Earlier tokens that a token sees besides itself; all of its document's where not given
    #[arg(long)]
    window: Option<usize>,
    /// Tokens of the pack
    #[arg(long, default_value_t = 512)]
    tokens: usize,
    /// Decides the documents
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Which pack of held-out documents
    #[arg(long, default_value_t = 0)]
    pack: u64,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let config = TrainConfig {
        ranks: args.ranks,
        layout: args.layout,
        exchange: args.exchange,
        tokens: args.tokens,
        seed: args.seed,
        ..TrainConfig::default()
    };
    config.validate()?;
    let pack = config.packs(Split::HeldOut)?.pack(args.pack);
    show_pack(&pack);
    let documents =
        Documents::from_lengths(std::slice::from_ref(&pack.document_lengths), args.tokens)?;
    let documents = match config.alignment() {
        Some(multiple) => documents.aligned(multiple)?.documents.flattened(),
        None => documents,
    };
    let sharding = config.context_parallel();
    let layout = sharding.layout.layout(&documents, args.ranks)?;
    let documents = Arc::new(documents.padded_to(layout.seq_len())?);
    let mask = MaskKind::Causal {
        window: args.window,
    };
    let plan = AttentionPlan::new(documents, Arc::new(layout), mask)?;
    show_plan(&plan, &config)?;
    show_frames(&pack, &config)
}

fn show_pack(pack: &Pack) {
    println!(
        "{} documents, {} real tokens of {}",
        pack.document_lengths.len(),
        pack.num_real_tokens(),
        pack.num_tokens()
    );
    let mut start = 0;
    for (i, len) in pack.document_lengths.iter().enumerate() {
        let text: Vec<String> = pack.ids[start..start + len]
            .iter()
            .map(|&id| vocabulary::name(id))
            .collect();
        println!(
            "  document {i}: tokens {}: {}",
            range(&(start..start + len)),
            shortened(&text)
        );
        start += len;
    }
}

/// The first and last tokens of a document, with runs of placeholders counted.
fn shortened(tokens: &[String]) -> String {
    let mut runs: Vec<(String, usize)> = Vec::new();
    for token in tokens {
        match runs.last_mut() {
            Some((last, count)) if last == token => *count += 1,
            _ => runs.push((token.clone(), 1)),
        }
    }
    let mut words: Vec<String> = runs
        .into_iter()
        .map(|(token, count)| {
            if count > 1 {
                format!("{token}*{count}")
            } else {
                token
            }
        })
        .collect();
    if words.len() > 24 {
        let tail = words.split_off(words.len() - 10);
        words.truncate(12);
        words.push("..".to_owned());
        words.extend(tail);
    }
    words.join(" ")
}

fn show_plan(plan: &AttentionPlan, config: &TrainConfig) -> Result<(), Box<dyn Error>> {
    let text = config.model().text_config;
    let shape = CostShape {
        num_heads: text.num_attention_heads,
        num_kv_heads: text.num_kv_heads(),
        head_dim: text.head_dim,
        v_head_dim: text.head_dim,
        bytes_per_element: 4,
    };
    let strategy = config.context_parallel().exchange;
    println!(
        "\nlayout: {} tokens over {} ranks; plan {}",
        plan.layout().seq_len(),
        plan.world_size(),
        &plan.hash_hex()[..16]
    );
    for (rank, ours) in plan.ranks().iter().enumerate() {
        let owned: Vec<String> = plan.layout().ranges(rank).iter().map(range).collect();
        let bytes = plan.exchange_bytes(strategy, &shape, rank);
        println!("  rank {rank}: tokens {}", owned.join(" "));
        println!(
            "    {} real tokens, {} segments, {} visible pairs, {} K/V tokens of others; per layer {} B in, {} B out",
            ours.tokens,
            ours.segments.len(),
            ours.area,
            ours.kv_tokens_received,
            bytes.received,
            bytes.sent
        );
        for segment in &ours.segments {
            println!(
                "      queries {} see keys {} of the buffer, from document position {}",
                range(&segment.q),
                range(&segment.k),
                segment.k_position
            );
        }
    }
    println!(
        "\nK/V tokens that travel, from row to column (balance of work {:.2}):",
        plan.balance()
    );
    for source in 0..plan.world_size() {
        let row: Vec<String> = (0..plan.world_size())
            .map(|to| format!("{:>6}", plan.num_transferred(source, to)))
            .collect();
        println!("  rank {source}: {}", row.join(""));
    }
    Ok(())
}

fn show_frames(pack: &Pack, config: &TrainConfig) -> Result<(), Box<dyn Error>> {
    let vision = config.model().vision_config;
    let grids: Vec<[usize; 3]> = pack.media.iter().map(|media| media.grid).collect();
    let sharding = config.context_parallel().vision;
    let alpha = sharding.alpha(vision.hidden_size);
    let merge = vision.spatial_merge_size;
    let shares = plan_frames(&grids, merge, config.ranks, alpha, &sharding)?;
    println!("\n{} images and videos", grids.len());
    for (rank, share) in shares.shares().iter().enumerate() {
        println!(
            "  rank {rank}: frames {}, pixel rows {}, {} tokens{}",
            range(&share.frames),
            range(&share.pixel_rows),
            share.num_tokens,
            if share.is_dummy() {
                " (a dummy frame)"
            } else {
                ""
            }
        );
    }
    Ok(())
}

fn range(range: &Range<usize>) -> String {
    format!("{}..{}", range.start, range.end)
}
