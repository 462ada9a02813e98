//! A small tower over several ranks, against the same tower on one.

mod config;
mod faults;
mod frames;
mod scope;

use std::{sync::Mutex, time::Duration};

use burn::{
    backend::{Autodiff, Flex},
    tensor::{DType, Tensor, TensorData},
};

use super::*;
use crate::{
    collectives::CollectiveBackend,
    comm::{self, CommError, FailureCause, Groups, ProcessGroup, RankFailure},
    launch::{self, LaunchError, ThreadsOptions},
    mesh::DeviceMesh,
};

type B = Autodiff<Flex>;

const PATCH_DIM: usize = 3;
const INNER: usize = 4;
const WIDTHS: [usize; 3] = [5, 2, 3];

/// How the tower of a rank misbehaves.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    ExtraRow,
    LongLayer,
    MissingLayer,
    WideLayer,
    DoubleLayer,
    Double,
    Frozen,
    Error,
    Panic,
    Comm,
    CommError,
}

/// Grids and pixels that a tower was run with.
type Call = (Vec<[usize; 3]>, Vec<f32>);

/// Patches see the mean of their frame, so a frame that is torn apart or mixed with another one shows.
#[derive(Debug)]
struct Tower {
    /// `[PATCH_DIM, INNER]`, `[1, INNER]`, then `[4 * INNER, width]` for each output.
    weights: Vec<Tensor<B, 2>>,
    fault: Fault,
    /// Every call.
    calls: Mutex<Vec<Call>>,
}

/// Numbers between -1 and 1 that look random and depend on `seed` alone.
fn noise(rows: usize, columns: usize, seed: u64) -> Tensor<B, 2> {
    let value = |i: u64| ((i + 1) as f64 * 12.9898 + seed as f64 * 78.233).sin() * 43_758.545_3;
    let values: Vec<f32> = (0..(rows * columns) as u64)
        .map(|i| (2.0 * value(i).rem_euclid(1.0) - 1.0) as f32)
        .collect();
    Tensor::from_data(
        TensorData::new(values, [rows, columns]),
        &Default::default(),
    )
}

impl Tower {
    /// Every rank makes its own leaves, of equal values.
    fn new(trainable: bool) -> Self {
        let mut shapes = vec![[PATCH_DIM, INNER], [1, INNER]];
        shapes.extend(WIDTHS.map(|width| [4 * INNER, width]));
        let leaf = |(seed, [rows, columns]): (usize, [usize; 2])| {
            let weight = noise(rows, columns, seed as u64);
            if trainable {
                weight.require_grad()
            } else {
                weight
            }
        };
        Self {
            weights: shapes.into_iter().enumerate().map(leaf).collect(),
            fault: Fault::None,
            calls: Mutex::default(),
        }
    }
}

impl VisionTower<B> for Tower {
    fn spatial_merge_size(&self) -> usize {
        2
    }

    fn hidden_size(&self) -> usize {
        INNER
    }

    fn is_trainable(&self) -> bool {
        self.weights[0].is_require_grad() && self.fault != Fault::Frozen
    }

    fn forward(
        &self,
        pixels: Tensor<B, 2>,
        grids: &[[usize; 3]],
    ) -> Result<VisionFeatures<B>, TowerError> {
        let left = CommError::PeerLeft {
            op: "tensor parallel sum".to_owned(),
            rank: 0,
        };
        match self.fault {
            Fault::Panic => panic!("the lens is broken"),
            Fault::Error => return Err("the lens is fogged".into()),
            Fault::Comm => left.raise(),
            Fault::CommError => return Err(left.into()),
            _ => {}
        }
        let call = (grids.to_vec(), values(pixels.clone()));
        self.calls.lock().unwrap().push(call);
        let states = (pixels.matmul(self.weights[0].clone()) + self.weights[1].clone()).tanh();
        let (mut row, mut frames) = (0, Vec::new());
        for &[t, h, w] in grids {
            for _ in 0..t {
                let frame = states.clone().narrow(0, row, h * w);
                row += h * w;
                let mean = frame.clone().mean_dim(0);
                frames.push((frame + mean).reshape([h * w / 4, 4 * INNER]));
            }
        }
        assert_eq!(row, states.dims()[0], "the grids cover all rows");
        let merged = Tensor::cat(frames, 0);
        let mut outputs: Vec<_> = self.weights[2..]
            .iter()
            .map(|weight| merged.clone().matmul(weight.clone()))
            .collect();
        let last = outputs.len() - 1;
        match self.fault {
            Fault::ExtraRow => {
                outputs[0] = Tensor::cat(vec![outputs[0].clone(), noise(1, WIDTHS[0], 0)], 0)
            }
            Fault::LongLayer => {
                outputs[last] =
                    Tensor::cat(vec![outputs[last].clone(), noise(1, WIDTHS[last], 0)], 0)
            }
            Fault::WideLayer => outputs[last] = Tensor::cat(vec![outputs[last].clone(); 2], 1),
            Fault::DoubleLayer => outputs[last] = outputs[last].clone().cast(DType::F64),
            Fault::Double => outputs
                .iter_mut()
                .for_each(|output| *output = output.clone().cast(DType::F64)),
            Fault::MissingLayer => drop(outputs.pop()),
            _ => {}
        }
        Ok(VisionFeatures {
            embeddings: outputs.remove(0),
            deepstack: outputs,
        })
    }
}

fn pixels_of(grids: &[[usize; 3]]) -> Tensor<B, 2> {
    noise(grids.iter().map(|[t, h, w]| t * h * w).sum(), PATCH_DIM, 99)
}

fn values<const D: usize, K: Backend>(tensor: Tensor<K, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

/// Features, and the gradients of pixels and weights of a loss over every `world_size`-th token; the last rank uses no token.
fn train(
    group: &ProcessGroup,
    config: &VisionShardingConfig,
    grids: &[[usize; 3]],
) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let tower = Tower::new(true);
    let pixels = pixels_of(grids).require_grad();
    let features = FrameSharded::new(&tower, group, config)
        .forward(pixels.clone(), grids)
        .unwrap();
    let parts: Vec<_> = std::iter::once(features.embeddings)
        .chain(features.deepstack)
        .collect();
    let num_users = group.size().max(2) - 1;
    let mut loss: Tensor<B, 1> = Tensor::zeros([1], &Default::default());
    for (seed, part) in parts.iter().enumerate() {
        let [rows, width] = part.dims();
        let mine = |i: usize| {
            if i / width % num_users == group.rank() {
                1.0
            } else {
                0.0
            }
        };
        let mask: Vec<f32> = (0..rows * width).map(mine).collect();
        let mask =
            Tensor::<B, 2>::from_data(TensorData::new(mask, [rows, width]), &Default::default());
        loss =
            loss + (part.clone() * part.clone() * noise(rows, width, 7 + seed as u64) * mask).sum();
    }
    let grads = loss.backward();
    let leaves = std::iter::once(&pixels).chain(&tower.weights);
    let grads = leaves
        .map(|leaf| {
            values(
                leaf.grad(&grads)
                    .unwrap_or_else(|| leaf.clone().inner().zeros_like()),
            )
        })
        .collect();
    (parts.into_iter().map(values).collect(), grads)
}

fn assert_close(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let norm = |values: &mut dyn Iterator<Item = f32>| {
        values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt()
    };
    let difference = norm(&mut got.iter().zip(expected).map(|(a, b)| a - b));
    let size = norm(&mut expected.iter().copied());
    assert!(
        difference <= 1e-5 * size,
        "{what}: relative difference {}",
        difference / size
    );
}

fn ranks<T: Send>(
    world_size: usize,
    f: impl Fn(&ProcessGroup) -> T + Sync,
) -> Result<Vec<T>, LaunchError> {
    replicated_ranks(world_size, 1, |groups| f(&groups.along(&["cp"]).unwrap()))
}

/// Runs `f` on every rank of a mesh of `cp` ranks with `tp` replicas each.
fn replicated_ranks<T: Send>(
    cp: usize,
    tp: usize,
    f: impl Fn(Groups) -> T + Sync,
) -> Result<Vec<T>, LaunchError> {
    let mesh = DeviceMesh::new([("cp", cp), ("tp", tp)]).unwrap();
    let options = ThreadsOptions {
        deadline: Duration::from_secs(60),
        ..ThreadsOptions::default()
    };
    launch::threads_with(mesh.world_size(), options, |rank| {
        Ok::<_, CommError>(f(comm::bind(&mesh, &rank)?))
    })
}

#[test]
fn sharded_features_and_summed_gradients_equal_those_of_one_rank() {
    let mixed = [[1, 2, 2], [1, 4, 4], [3, 2, 4], [1, 6, 4], [1, 2, 2]];
    let two_images = [[1, 2, 4], [1, 4, 2]];
    for grids in [&mixed[..], &two_images[..], &[[5, 2, 2]], &[[1, 4, 4]]] {
        let always = VisionShardingConfig::always();
        let (features, grads) = train(&ProcessGroup::solo(), &always, grids);
        for world_size in 1..=4 {
            for config in [
                always.clone().with_min_local_patch_rows(0),
                always.clone().with_min_local_patch_rows(20),
                always.clone(),
                VisionShardingConfig::replicated(),
            ] {
                let what = format!("{grids:?} on {world_size} ranks, {config:?}");
                let results = ranks(world_size, |group| train(group, &config, grids)).unwrap();
                let mut sums: Vec<Vec<f32>> =
                    grads.iter().map(|grad| vec![0.0; grad.len()]).collect();
                for (got, grads) in &results {
                    for (got, expected) in got.iter().zip(&features) {
                        assert_close(got, expected, &what);
                    }
                    for (sum, grad) in sums.iter_mut().zip(grads) {
                        sum.iter_mut()
                            .zip(grad)
                            .for_each(|(sum, grad)| *sum += grad);
                    }
                }
                for (i, (sum, expected)) in sums.iter().zip(&grads).enumerate() {
                    assert_close(sum, expected, &format!("{what}, gradient {i}"));
                }
            }
        }
    }
}

#[test]
fn a_dummy_frame_takes_part_in_backward_with_zero_gradients() {
    let results = ranks(3, |group| {
        train(group, &VisionShardingConfig::always(), &[[1, 2, 2]])
    })
    .unwrap();
    // Of the pixels, then of the weights; the bias sees every row that the tower runs.
    let bias = 2;
    assert!(results[0].1[bias].iter().any(|&grad| grad != 0.0));
    for (_, grads) in &results[1..] {
        assert_eq!(grads.len(), 3 + WIDTHS.len());
        assert!(grads.iter().flatten().all(|&grad| grad == 0.0));
    }
}

#[test]
fn a_tower_is_given_its_own_rows_then_zeros_up_to_the_floor() {
    let grids = [[2, 2, 2], [1, 4, 4]];
    let calls = ranks(4, |group| {
        let tower = Tower::new(false);
        let config = VisionShardingConfig::always().with_min_local_patch_rows(11);
        FrameSharded::new(&tower, group, &config)
            .forward(pixels_of(&grids), &grids)
            .unwrap();
        tower.calls.into_inner().unwrap()
    })
    .unwrap();
    let pixels = values(pixels_of(&grids));
    let zeros = vec![0.0; 8 * PATCH_DIM];
    let expected = [
        (
            vec![[1, 2, 2], [2, 2, 2]],
            [&pixels[..4 * PATCH_DIM], &zeros].concat(),
        ),
        (
            vec![[1, 2, 2], [2, 2, 2]],
            [&pixels[4 * PATCH_DIM..8 * PATCH_DIM], &zeros].concat(),
        ),
        (vec![[1, 4, 4]], pixels[8 * PATCH_DIM..].to_vec()),
        (vec![[1, 2, 2]], vec![0.0; 4 * PATCH_DIM]),
    ];
    for (rank, (calls, expected)) in calls.into_iter().zip(expected).enumerate() {
        assert_eq!(calls, [expected], "rank {rank}");
    }
}

#[test]
fn a_frozen_tower_is_sharded_without_a_graph() {
    let outputs = ranks(3, |group| {
        let (tower, config) = (Tower::new(false), VisionShardingConfig::always());
        let grids = [[1, 2, 2], [1, 4, 4]];
        let features = FrameSharded::new(&tower, group, &config)
            .forward(pixels_of(&grids), &grids)
            .unwrap();
        let num_layers = features.deepstack.len();
        let dims = features.embeddings.dims();
        let tracked = B::leaf_id(&features.embeddings.into_primitive().tensor()).is_some();
        (dims, num_layers, tracked)
    });
    assert_eq!(outputs.unwrap(), [([5, WIDTHS[0]], 2, false); 3]);
}

#[test]
fn pixels_and_grids_are_checked_before_the_tower_runs() {
    let (group, config) = (ProcessGroup::solo(), VisionShardingConfig::default());
    let mut tower = Tower::new(false);
    tower.fault = Fault::Panic;
    let sharded = FrameSharded::new(&tower, &group, &config);
    let refused = |rows, grids: &[[usize; 3]]| {
        sharded
            .forward(noise(rows, PATCH_DIM, 0), grids)
            .unwrap_err()
    };
    assert!(matches!(
        refused(5, &[[1, 2, 2]]),
        VisionError::PixelRows {
            expected: 4,
            got: 5,
            ..
        }
    ));
    assert!(matches!(
        refused(6, &[[1, 2, 3]]),
        VisionError::Grid {
            grid: [1, 2, 3],
            merge: 2
        }
    ));
    assert!(matches!(refused(0, &[]), VisionError::NoEntries));
}

#[test]
fn the_plan_tells_who_computes_what() {
    let tower = Tower::new(false);
    let plans = ranks(2, |group| {
        let config = VisionShardingConfig::always();
        FrameSharded::new(&tower, group, &config)
            .plan(&[[1, 2, 2], [4, 2, 2], [1, 4, 4]])
            .unwrap()
    });
    let plans = plans.unwrap();
    assert_eq!(plans[0], plans[1]);
    assert_eq!(plans[0].num_frames_per_rank(), [5, 1]);
}
