//! The backward pass whose kernel computes all gradients at once: its schedule on the device, and its launches.

use burn::tensor::DType;
use cubecl::server::Handle;

use super::{
    call::{Bindings, Call, Tensor},
    task::Entry,
};
use crate::{
    components::matrix::{JOINT_FIELDS, JOINT_KEYS, JOINT_QUERIES},
    definition::{AttentionGradients, AttentionProblem, Segments},
    kernels::tensor_core::shares::TURNS,
    launch::{
        hopper::plan::{BackwardPlan, backward_of},
        tensors::{empty_like, filled, table_place},
    },
};

/// The schedule on a device, and what it was made for.
struct Uploaded {
    key: (String, [usize; 3]),
    tables: JointTables,
}

/// Tables of a schedule. They are those of the hopper routine, whose kernel takes turns in the same way.
#[derive(Clone)]
struct JointTables {
    items: Handle,
    num_items: usize,
    runs: Handle,
    num_runs: usize,
    q_tiles: Handle,
    num_q_tiles: usize,
}

fn tables(like: &Tensor, segments: &Segments, problem: &AttentionProblem) -> JointTables {
    let hardware = &like.client.properties().hardware;
    let num_cubes = hardware.num_streaming_multiprocessors.unwrap_or(128) as usize;
    let heads = [problem.num_heads, problem.num_kv_heads];
    let key = (table_place(&like.device), [heads[0], heads[1], num_cubes]);
    let uploaded = segments.cache().get_or_make(
        |uploaded: &Uploaded| uploaded.key == key,
        || {
            let sizes = [JOINT_QUERIES, JOINT_KEYS];
            let plan = backward_of(segments, problem, num_cubes, sizes);
            Uploaded {
                key: key.clone(),
                tables: upload(like, &plan),
            }
        },
    );
    uploaded.tables.clone()
}

fn upload(like: &Tensor, plan: &BackwardPlan) -> JointTables {
    let client = &like.client;
    JointTables {
        items: client.create_from_slice(bytemuck::cast_slice(&plan.items)),
        num_items: plan.items.len(),
        runs: client.create_from_slice(bytemuck::cast_slice(&plan.visits)),
        num_runs: plan.visits.len(),
        q_tiles: client.create_from_slice(bytemuck::cast_slice(&plan.q_tiles)),
        num_q_tiles: plan.q_tiles.len(),
    }
}

/// Gradients of a call that has rows and keys. `shared` binds what every kernel of a backward pass reads.
pub(super) fn gradients(
    call: &Call,
    segments: &Segments,
    [q, k, v]: [&Tensor; 3],
    shared: impl Fn() -> Bindings,
) -> AttentionGradients<Tensor> {
    let problem = call.problem;
    let tables = tables(q, segments, problem);
    let targets = tables.num_q_tiles * problem.num_heads;
    let share = JOINT_QUERIES * call.blueprint.keys().padded();
    let turns = filled(q, vec![TURNS + targets], 0.0, DType::U32);
    let shares = q.client.empty(4 * targets * share);
    let dq = empty_like(q, problem.q_shape(), q.dtype);
    let dk = empty_like(k, problem.k_shape(), k.dtype);
    let dv = empty_like(v, problem.v_shape(), v.dtype);
    let bindings = shared()
        .array(&tables.items, tables.num_items * JOINT_FIELDS)
        .array(&tables.runs, tables.num_runs * JOINT_FIELDS)
        .array(&turns.handle, TURNS + targets)
        .array(&shares, targets * share / 4)
        .tensor(&dk, 2)
        .tensor(&dv, 2);
    call.launch_all(Entry::Gradients, tables.num_items, bindings);
    let bindings = Bindings::default()
        .array(&tables.q_tiles, tables.num_q_tiles * 4)
        .array(&turns.handle, TURNS + targets)
        .array(&shares, targets * share / 4)
        .tensor(&dq, 2);
    call.launch_all(Entry::Finish, targets, bindings);
    AttentionGradients::new(dq, dk, dv)
}
