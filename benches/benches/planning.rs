//! How long layout and plan take on the host.

#![allow(
    missing_docs,
    reason = "criterion_group makes an undocumented function"
)]

use std::{hint::black_box, sync::Arc};

use burn_cp::{
    layout::LayoutPolicy,
    plan::{AttentionPlan, MaskKind},
};
use burn_cp_benches::packed_documents;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

fn planning(c: &mut Criterion) {
    let mut group = c.benchmark_group("layout and plan");
    for (num_documents, world_size) in [(1_000, 8), (10_000, 64)] {
        let documents = packed_documents(num_documents, 64);
        for (name, policy) in [
            ("contiguous", LayoutPolicy::Contiguous { multiple: 1 }),
            ("head-tail", LayoutPolicy::HeadTail),
        ] {
            let id = BenchmarkId::new(
                name,
                format!("{num_documents} documents, {world_size} ranks"),
            );
            group.bench_function(id, |b| {
                b.iter(|| {
                    let layout = policy.layout(&documents, world_size).expect("a layout");
                    let padded = documents.padded_to(layout.seq_len()).expect("padding");
                    let plan =
                        AttentionPlan::new(Arc::new(padded), Arc::new(layout), MaskKind::CAUSAL);
                    black_box(plan.expect("a plan"))
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, planning);
criterion_main!(benches);
