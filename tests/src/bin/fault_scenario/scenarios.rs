//! What goes wrong, where, and the training step in which it does.

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
use crate::model::{
    B, Decoder, Fault, FaultyTower, Inner, Output, Patches, Run, Twist, VOCAB, fork,
};

/// Something that goes wrong on one rank, and the mesh on which it does.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scenario {
    mesh: [usize; 2],
    rank: usize,
    exchange: ExchangeStrategy,
    overlap: bool,
    kind: Kind,
    /// Whether a rank may never end.
    pub(crate) detached: bool,
}

impl Scenario {
    pub(crate) fn world_size(&self) -> usize {
        self.mesh.iter().product()
    }

    /// The same with nothing that goes wrong.
    fn without_fault(self) -> Self {
        Self {
            rank: usize::MAX,
            kind: Kind::Leave,
            ..self
        }
    }

    /// Heads of queries, and of keys and values: as many as can be dealt out, where they are.
    fn num_heads(&self) -> [usize; 2] {
        match self.exchange {
            ExchangeStrategy::HeadAllToAll => [2 * self.mesh[1], self.mesh[1]],
            _ => [2, 1],
        }
    }
}

/// What a rank does where the others go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Panic,
    PanicValue,
    Sleep,
    OtherCollective,
    HostMessage,
    Shape,
    Dtype,
    /// A kernel writes where nothing is; for so long the rank submits nothing more.
    #[cfg(feature = "cuda")]
    IllegalAddress(Duration),
}

impl Act {
    fn may_never_end(self) -> bool {
        match self {
            Self::Sleep => true,
            #[cfg(feature = "cuda")]
            Self::IllegalAddress(_) => true,
            _ => false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Forward(Act),
    Backward(Act),
    Tower(Act),
    TowerBackward(Act),
    TowerOutput(Output),
    Attention(Twist),
    Error,
    ErrorBeforeBackward,
    Leave,
    LeaveBeforeBackward,
    Documents,
    Ids,
    Labels,
    Positions,
    Padding,
    Placement,
    Grids,
    Layout,
    SharedLeaf,
    LazyParameters,
    Frozen,
}

/// The exchange strategy that a name begins with, whether it overlaps, and the rest of the name.
fn exchange_of(name: &str) -> (ExchangeStrategy, bool, &str) {
    use ExchangeStrategy::{AllGather, HeadAllToAll, LeftHalo, NeededOnly, Ring};
    let known = [
        ("gather-overlap-", AllGather, true),
        ("gather-", AllGather, false),
        ("needed-overlap-", NeededOnly, true),
        ("halo-", LeftHalo, false),
        ("ring-", Ring, false),
        ("heads-", HeadAllToAll, false),
    ];
    let found = known.into_iter().find_map(|(prefix, exchange, overlap)| {
        let rest = name.strip_prefix(prefix)?;
        Some((exchange, overlap, rest))
    });
    found.unwrap_or((NeededOnly, false, name))
}

/// The scenario of a name.
pub(crate) fn scenario(name: &str) -> Option<Scenario> {
    use Kind::*;
    let (exchange, overlap, name) = exchange_of(name);
    let worlds = [("mesh-", [2, 2], 3), ("two-", [1, 2], 1), ("", [1, 3], 1)];
    let (name, mesh, rank) = worlds
        .into_iter()
        .find_map(|(prefix, mesh, rank)| Some((name.strip_prefix(prefix)?, mesh, rank)))?;
    let kind = match name {
        "panic-in-forward" => Forward(Act::Panic),
        "panic-with-a-value" => Forward(Act::PanicValue),
        "panic-in-backward" => Backward(Act::Panic),
        "panic-in-vision-tower" => Tower(Act::Panic),
        "panic-in-vision-backward" => TowerBackward(Act::Panic),
        "other-rows-from-vision-tower" => TowerOutput(Output::Row),
        "deepstack-from-vision-tower" => TowerOutput(Output::Deepstack),
        "other-dtype-from-vision-tower" => TowerOutput(Output::Dtype),
        "error-in-vision-tower" => TowerOutput(Output::Error),
        "error-in-forward" => Error,
        "error-before-backward" => ErrorBeforeBackward,
        "other-collective-in-forward" => Forward(Act::OtherCollective),
        "other-collective-in-backward" => Backward(Act::OtherCollective),
        "host-message-in-forward" => Forward(Act::HostMessage),
        "host-message-in-backward" => Backward(Act::HostMessage),
        "other-shape-in-forward" => Attention(Twist::HeadDim),
        "other-shape-in-backward" => Backward(Act::Shape),
        "other-dtype-in-forward" => Attention(Twist::Dtype),
        "other-dtype-in-backward" => Backward(Act::Dtype),
        "untracked-on-one-rank" => Attention(Twist::Detached),
        "other-mask" => Attention(Twist::Window),
        "other-documents" => Documents,
        "other-ids" => Ids,
        "other-labels" => Labels,
        "other-positions" => Positions,
        "other-padding" => Padding,
        "other-placement" => Placement,
        "other-grids" => Grids,
        "other-layout" => Layout,
        "never-arrives-in-forward" => Forward(Act::Sleep),
        "never-arrives-in-backward" => Backward(Act::Sleep),
        "leaves-in-forward" => Leave,
        "leaves-before-backward" => LeaveBeforeBackward,
        "shared-leaf" => SharedLeaf,
        "lazy-parameters" => LazyParameters,
        "other-parameters-trained" => Frozen,
        // The watchdog looks several times.
        #[cfg(feature = "cuda")]
        "illegal-address-in-forward" => Forward(Act::IllegalAddress(Duration::from_millis(500))),
        // The host goes on at once.
        #[cfg(feature = "cuda")]
        "illegal-address-in-backward" => Backward(Act::IllegalAddress(Duration::ZERO)),
        "no-fault" => Leave,
        _ => return None,
    };
    let detached = match kind {
        Forward(act) | Backward(act) => act.may_never_end(),
        _ => false,
    };
    let scenario = Scenario {
        mesh,
        rank,
        exchange,
        overlap,
        kind,
        detached,
    };
    Some(match name {
        "no-fault" => scenario.without_fault(),
        _ => scenario,
    })
}

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
    let (_, norm) = optim::clip_by_global_norm::<B, _>(grads, &model, 1.0);
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
