//! The training step in which something goes wrong.

use std::{error::Error, sync::Arc, thread, time::Duration};

use burn::{
    module::Module,
    optim::GradientsParams,
    tensor::{DType, Device, Tensor, TensorData},
};
use burn_cp::{
    batch::{Media, SequenceBatch},
    collectives,
    comm::{self, Groups, ProcessGroup, RankContext},
    layout::{Documents, LayoutPolicy, Placement},
    mesh::DeviceMesh,
    nn::SequenceSharded,
    optim,
    plan::ExchangeStrategy,
    sharder::{ContextParallel, ContextParallelConfig},
    vision::VisionShardingConfig,
};

use burn_cp_tests::{OTHER_DTYPE, device, enter_rank, faults::WARM_UP};

#[cfg(feature = "cuda")]
use crate::illegal_address;
use crate::model::{B, Decoder, Fault, FaultyTower, Inner, Output, Patches, Run, VOCAB, fork};
use crate::scenarios::{Act, Kind, Scenario};

/// What all ranks start from.
#[derive(Debug)]
pub(crate) struct Setting {
    scenario: Scenario,
    mesh: DeviceMesh,
    lazy: Decoder<B>,
    model: Decoder<B>,
    tower: Patches<B>,
}

impl Setting {
    pub(crate) fn new(scenario: Scenario) -> Self {
        let device = Default::default();
        let [dp, cp] = scenario.mesh;
        let mesh = DeviceMesh::new([("dp", dp), ("cp", cp)]).expect("sizes of at least 1");
        let heads = scenario.num_heads();
        let lazy = Decoder::lazy(heads, &device);
        let model = Decoder::materialised(heads, &device);
        let tower = Patches::new(&device);
        assert!(tower.num_params() > 0);
        Self {
            scenario,
            mesh,
            lazy,
            model,
            tower,
        }
    }
}

type AnyError = Box<dyn Error + Send + Sync>;

/// One rank: on devices a step that goes right, since kernels are compiled in the first one, and then the step of the scenario.
/// `starts` is called before it.
pub(crate) fn run_rank(
    context: &RankContext,
    setting: &Setting,
    starts: impl FnOnce(),
) -> Result<f64, AnyError> {
    enter_rank(context);
    let groups = comm::bind(&setting.mesh, context)?;
    if WARM_UP {
        train_step(context, setting, &groups, setting.scenario.without_fault())?;
        groups.world()?.barrier()?;
    }
    starts();
    train_step(context, setting, &groups, setting.scenario)
}

fn train_step(
    context: &RankContext,
    setting: &Setting,
    groups: &Groups,
    scenario: Scenario,
) -> Result<f64, AnyError> {
    let device = device();
    let at = |kind: Kind| context.rank() == scenario.rank && scenario.kind == kind;
    let layout = if at(Kind::Layout) {
        LayoutPolicy::HeadTail
    } else {
        LayoutPolicy::Contiguous { multiple: 1 }
    };
    let config = ContextParallelConfig {
        layout,
        exchange: scenario.exchange,
        overlap: scenario.overlap,
        vision: VisionShardingConfig::always(),
        ..Default::default()
    };
    let cp = ContextParallel::new(groups, config)?;
    let mut model = match scenario.kind {
        Kind::LazyParameters if context.rank() == scenario.rank => {
            fork(setting.lazy.clone(), &device)
        }
        // The last two ranks.
        Kind::SharedLeaf if context.rank() + 2 >= scenario.world_size() => setting.model.clone(),
        _ => fork(setting.model.clone(), &device),
    };
    if at(Kind::Frozen) {
        model = model.with_frozen_embedding();
    }
    let model = SequenceSharded::new(model, &cp)?;

    let replica = groups.global_rank() / scenario.mesh[1];
    let lengths = match scenario.exchange {
        // One document goes over all ranks, so that there is more than one step.
        ExchangeStrategy::Ring => [2, 22],
        _ => [10, 14],
    };
    let step = cp.shard(batch(replica, &at, lengths, &device), &device)?;
    let fault = decoder_fault(scenario, context.rank(), step.group());
    let tower = FaultyTower {
        patches: fork(setting.tower.clone(), &device),
        fault: tower_fault(scenario, context.rank(), step.group()),
        output: match scenario.kind {
            Kind::TowerOutput(output) if context.rank() == scenario.rank => output,
            _ => Output::Right,
        },
    };
    let features = step
        .encode_media(&tower)?
        .map(|features| step.scatter_media(features.embeddings));
    if at(Kind::Error) {
        return Err("the data loader ran dry".into());
    }
    if at(Kind::Leave) {
        return Ok(0.0);
    }
    let logits = model.inner().run(&step, features, &fault)?;
    let loss = step.cross_entropy(logits)?;
    if at(Kind::ErrorBeforeBackward) {
        return Err("the data loader ran dry".into());
    }
    if at(Kind::LeaveBeforeBackward) {
        return Ok(0.0);
    }
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let grads = optim::sync_gradients::<B, _>(grads, &model, groups, &["dp", "cp"])?;
    let (_, norm) = optim::clip_by_global_norm::<B, _>(grads, &model, 1.0, &groups.world()?)?;
    Ok(norm)
}

fn batch(
    replica: usize,
    at: &impl Fn(Kind) -> bool,
    lengths: [usize; 2],
    device: &Device<B>,
) -> SequenceBatch<B> {
    const SEQ: usize = 24;
    let ids: Vec<i64> = (0..SEQ)
        .map(|i| ((i * 7 + replica * 3) % VOCAB) as i64)
        .collect();
    // The last two tokens are padding, or may be.
    let mut labels = [&ids[1..SEQ - 1], &[-100, -100]].concat();
    if at(Kind::Labels) {
        labels[0] = (labels[0] + 1) % VOCAB as i64;
    }
    let mut ids = ids;
    ids[SEQ - 1] += i64::from(at(Kind::Ids));
    let lengths = if at(Kind::Documents) {
        vec![9, 15]
    } else {
        lengths.to_vec()
    };
    let placeholders: Vec<bool> = (0..SEQ).map(|i| (2..8).contains(&i)).collect();
    let patches: Vec<f32> = (0..18).map(|i| (i as f32 * 0.3).sin()).collect();
    let media = Media {
        name: "image".to_owned(),
        pixels: Tensor::from_data(TensorData::new(patches, [6, 3]), device),
        grids: if at(Kind::Grids) {
            vec![[3, 1, 2]]
        } else {
            vec![[1, 1, 2]; 3]
        },
        spatial_merge_size: 1,
        placeholders: TensorData::new(placeholders, [1, SEQ]),
    };
    // Padding from the last token on, or from the one before.
    let first_padding = SEQ - 1 - usize::from(at(Kind::Padding));
    let padding: Vec<bool> = (0..SEQ).map(|i| i >= first_padding).collect();
    let positions: Vec<i64> = (0..SEQ as i64)
        .map(|i| i + i64::from(at(Kind::Positions)))
        .collect();
    // The padding goes to the slot behind it on one rank.
    let targets = (0..SEQ).map(|i| Some(i + usize::from(i + 1 == SEQ && at(Kind::Placement))));
    let placement = Placement::from_rows(&[targets.collect()], SEQ + 1).expect("slots in order");
    SequenceBatch::from_ids(TensorData::new(ids, [1, SEQ]))
        .with_positions(TensorData::new(positions, [1, SEQ]))
        .with_padding_mask(TensorData::new(padding, [1, SEQ]))
        .with_placement(placement)
        .with_labels(TensorData::new(labels, [1, SEQ]))
        .with_documents(Documents::from_lengths(&[lengths], SEQ + 1).expect("the lengths fit"))
        .with_media(media)
}

fn decoder_fault(scenario: Scenario, rank: usize, group: &ProcessGroup) -> Fault {
    let odd = rank == scenario.rank;
    match scenario.kind {
        Kind::Forward(act) => Fault {
            forward: run(act, odd, group),
            ..Fault::default()
        },
        Kind::Backward(act) => Fault {
            backward: run(act, odd, group),
            ..Fault::default()
        },
        Kind::Attention(twist) if odd => Fault {
            attention: twist,
            ..Fault::default()
        },
        _ => Fault::default(),
    }
}

fn tower_fault(scenario: Scenario, rank: usize, group: &ProcessGroup) -> Fault {
    let odd = rank == scenario.rank;
    match scenario.kind {
        Kind::Tower(act) => Fault {
            forward: run(act, odd, group),
            ..Fault::default()
        },
        Kind::TowerBackward(act) => Fault {
            backward: run(act, odd, group),
            ..Fault::default()
        },
        _ => Fault::default(),
    }
}

/// What a rank does at the place of the fault; the ranks without fault take part in a collective where the faulty one does so
/// with another shape or dtype.
fn run(act: Act, odd: bool, group: &ProcessGroup) -> Option<Arc<Run>> {
    let (group, host) = (group.clone(), group.clone());
    let all_reduce = move |len: usize, dtype: DType| {
        let zeros = Tensor::<Inner, 1>::zeros([len], (&device(), dtype));
        let _ = collectives::all_reduce(zeros, &group);
    };
    let on_all = matches!(act, Act::Shape | Act::Dtype);
    if !odd {
        return on_all.then(|| Arc::new(move || all_reduce(4, DType::F32)) as Arc<Run>);
    }
    Some(match act {
        Act::Panic => Arc::new(|| panic!("the fault")),
        Act::PanicValue => Arc::new(|| std::panic::panic_any(7_i32)),
        Act::Sleep => Arc::new(|| thread::sleep(Duration::from_secs(60))),
        Act::OtherCollective => Arc::new(move || all_reduce(4, DType::F32)),
        Act::HostMessage => Arc::new(move || collectives::barrier(&host)),
        Act::Shape => Arc::new(move || all_reduce(5, DType::F32)),
        Act::Dtype => Arc::new(move || all_reduce(4, OTHER_DTYPE)),
        #[cfg(feature = "cuda")]
        Act::IllegalAddress(pause) => {
            let gpu = device::<cubecl::cuda::CudaDevice>().index;
            Arc::new(move || {
                illegal_address::write(gpu)
                    .unwrap_or_else(|error| panic!("the kernel does not start: {error}"));
                thread::sleep(pause);
            })
        }
    })
}
