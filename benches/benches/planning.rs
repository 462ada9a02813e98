//! How long layout and plan take on the host.

#![allow(
    missing_docs,
    reason = "criterion_group makes an undocumented function"
)]

use std::{hint::black_box, sync::Arc};

use burn_cp::{
    layout::{Documents, LayoutPolicy, Visibility},
    plan::{AttentionPlan, MaskKind},
};
use burn_cp_benches::{log_normal_lengths, packed_documents};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

fn planning(c: &mut Criterion) {
    let mut group = c.benchmark_group("layout and plan");
    for (num_documents, world_size) in [(1_000, 8), (10_000, 64)] {
        let short = packed_documents(num_documents, 64);
        let mut lengths = log_normal_lengths(1, 1024.0, 3_000 * num_documents);
        lengths.truncate(num_documents);
        let seq_len = lengths.iter().sum();
        let long =
            Documents::from_lengths(&[lengths], seq_len).expect("documents that fill their row");
        for (name, policy) in [
            ("contiguous", LayoutPolicy::Contiguous { multiple: 1 }),
            ("head-tail", LayoutPolicy::HeadTail),
            (
                "balanced",
                LayoutPolicy::Balanced {
                    visibility: Visibility::default(),
                },
            ),
        ] {
            for (kind, documents) in [("documents", &short), ("log-normal documents", &long)] {
                let num = documents.num_documents();
                let id = BenchmarkId::new(name, format!("{num} {kind}, {world_size} ranks"));
                group.bench_function(id, |b| {
                    b.iter(|| {
                        let layout = policy.layout(documents, world_size).expect("a layout");
                        let padded = documents.padded_to(layout.seq_len()).expect("padding");
                        let (documents, layout) = (Arc::new(padded), Arc::new(layout));
                        let plan = AttentionPlan::new(documents, layout, MaskKind::CAUSAL);
                        black_box(plan.expect("a plan"))
                    });
                });
            }
        }
    }
    group.finish();
}

criterion_group!(benches, planning);
criterion_main!(benches);
