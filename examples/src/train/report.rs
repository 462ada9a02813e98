//! What a run shows and writes: progress bar, table, `metrics.jsonl`, `summary.json`, `loss.svg`.

use std::{
    fs,
    io::{self, Write},
    marker::PhantomData,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use indicatif::{ProgressBar, ProgressStyle};
use plotters::prelude::*;
use serde::{Deserialize, Serialize};

use super::{
    Architecture, CheckpointError, RunConfig, Score, TrainConfig, TrainState,
    checkpoint::Checkpoints,
};
use crate::models::qwen3_vl::Qwen3VlConfig;

/// A report that cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// The file system refused.
    #[error("{path}: {source}")]
    Io {
        /// File or folder.
        path: String,
        /// The system's reason.
        source: io::Error,
    },
    /// Checkpoints of an earlier run cannot be removed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The curve cannot be drawn.
    #[error("{path}: {reason}")]
    Draw {
        /// The picture.
        path: String,
        /// The library's reason.
        reason: String,
    },
}

/// One line of `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Metric {
    step: u64,
    loss: f64,
    tokens_per_s: f64,
    heldout_accuracy: Option<f64>,
}

/// `summary.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Summary<A: Architecture = Qwen3VlConfig> {
    /// Number of ranks.
    pub ranks: usize,
    /// Steps done.
    pub steps: u64,
    /// Loss of the last step.
    pub final_loss: f64,
    /// Teacher-forced top-1 accuracy on the answer digits of held-out documents.
    pub heldout_accuracy: f64,
    /// Real tokens trained per second.
    pub tokens_per_s: f64,
    /// Largest relative difference of the loss from one rank's, over all steps. With `--compare` only.
    pub max_rel_diff: Option<f64>,
    /// Largest relative difference of a parameter's gradient from one rank's, at step 0. With `--compare` only.
    pub max_rel_grad_diff: Option<f64>,
    /// Frames that each rank's vision tower encoded.
    pub vision_frames_per_rank: Vec<u64>,
    /// K/V tokens that each rank received from others in the attention of one layer.
    pub kv_tokens_received: Vec<u64>,
    /// SHA-256 of all parameters.
    pub parameters_sha256: String,
    /// Whether the run was interrupted before its last step.
    pub interrupted: bool,
    /// The run.
    pub config: TrainConfig<A>,
}

/// The files and the terminal of one run. Used by rank 0.
#[derive(Debug)]
pub struct Reporter<R> {
    out: PathBuf,
    bar: ProgressBar,
    metrics: Mutex<Vec<Metric>>,
    interrupt: Arc<AtomicBool>,
    run: PhantomData<fn() -> R>,
}

impl<R: RunConfig> Reporter<R> {
    /// Prepares the folder of a run. `resumed` is the state that the run continues from; without one, what an earlier run left
    /// there is removed.
    ///
    /// # Errors
    /// The folder cannot be made or written to.
    pub fn new(
        out: &Path,
        steps: u64,
        resumed: Option<&TrainState<R>>,
    ) -> Result<Self, ReportError> {
        let (metrics, at) = match resumed {
            Some(state) => (
                read_metrics(&out.join("metrics.jsonl"), state.step)?,
                state.step,
            ),
            None => (Vec::new(), 0),
        };
        fs::create_dir_all(out).map_err(io_error(out))?;
        // A run that cannot write should say so now, not after its first checkpoint.
        let probe = out.join(".writable");
        fs::write(&probe, b"").map_err(io_error(&probe))?;
        fs::remove_file(&probe).map_err(io_error(&probe))?;
        if resumed.is_none() {
            remove_earlier_run::<R>(out)?;
        }
        let bar = ProgressBar::new(steps).with_position(at);
        if let Ok(style) =
            ProgressStyle::with_template("{bar:30} step {pos}/{len} {msg} [{elapsed}, {eta} left]")
        {
            bar.set_style(style);
        }
        let reporter = Self {
            out: out.to_owned(),
            bar,
            metrics: Mutex::new(metrics),
            interrupt: Arc::default(),
            run: PhantomData,
        };
        reporter.write_metrics()?;
        Ok(reporter)
    }

    /// A report that writes nothing: for a rank that is another process than rank 0, and reads rank 0's checkpoints in `out`.
    pub fn reader(out: &Path) -> Self {
        Self {
            out: out.to_owned(),
            bar: ProgressBar::hidden(),
            metrics: Mutex::default(),
            interrupt: Arc::default(),
            run: PhantomData,
        }
    }

    /// The flag that asks the run to checkpoint and stop at the next step.
    pub fn interrupt(&self) -> Arc<AtomicBool> {
        self.interrupt.clone()
    }

    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }

    /// The run's checkpoints.
    pub(crate) fn checkpoints(&self) -> Checkpoints<R> {
        checkpoints_in(&self.out)
    }

    /// Prints the head of the table.
    pub fn start(&self) {
        self.print(&format!(
            "{:>6}  {:>9}  {:>9}  {:>17}",
            "step", "loss", "tokens/s", "held-out accuracy"
        ));
    }

    /// Reports a step; a row of the table where accuracy was measured.
    pub(crate) fn step(
        &self,
        state: &TrainState<R>,
        score: Option<Score>,
        tokens_per_s: f64,
    ) -> Result<(), ReportError> {
        let loss = state.losses.last().copied().unwrap_or(f64::NAN);
        let heldout_accuracy = score.map(|score| score.accuracy());
        let metric = Metric {
            step: state.step,
            loss,
            tokens_per_s,
            heldout_accuracy,
        };
        let path = self.out.join("metrics.jsonl");
        let mut line = to_json(&metric, &path)?;
        line.push('\n');
        let mut file = fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(&path)
            .map_err(io_error(&path))?;
        file.write_all(line.as_bytes()).map_err(io_error(&path))?;
        self.metrics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(metric);
        self.bar.set_position(state.step);
        self.bar
            .set_message(format!("loss {loss:.4}, {tokens_per_s:.0} tokens/s"));
        if let Some(accuracy) = heldout_accuracy {
            self.row(state.step, loss, tokens_per_s, accuracy);
        }
        Ok(())
    }

    /// Prints a row of the table.
    pub fn row(&self, step: u64, loss: f64, tokens_per_s: f64, accuracy: f64) {
        self.print(&format!(
            "{step:>6}  {loss:>9.5}  {tokens_per_s:>9.0}  {:>16.1}%",
            100.0 * accuracy
        ));
    }

    /// Prints above the progress bar.
    pub fn print(&self, line: &str) {
        // Without a terminal there is no bar, and its printing would be swallowed.
        self.bar.suspend(|| println!("{line}"));
    }

    /// Ends the progress bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn write_metrics(&self) -> Result<(), ReportError> {
        let path = self.out.join("metrics.jsonl");
        let mut text = String::new();
        for metric in self
            .metrics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
        {
            text.push_str(&to_json(metric, &path)?);
            text.push('\n');
        }
        replace(&path, text.as_bytes())
    }

    /// Writes `summary.json`.
    ///
    /// # Errors
    /// The file system refused.
    pub fn write_summary(&self, summary: &impl Serialize) -> Result<(), ReportError> {
        let path = self.out.join("summary.json");
        let text = serde_json::to_string_pretty(summary).map_err(|error| ReportError::Io {
            path: path.display().to_string(),
            source: error.into(),
        })?;
        replace(&path, text.as_bytes())
    }

    /// Draws `loss.svg`: the curves by name, under a title.
    ///
    /// # Errors
    /// The file system refused.
    pub fn draw(&self, title: &str, curves: &[(String, Vec<f64>)]) -> Result<(), ReportError> {
        let path = self.out.join("loss.svg");
        let mut svg = String::new();
        draw_curves(&mut svg, title, curves).map_err(|reason| ReportError::Draw {
            path: path.display().to_string(),
            reason,
        })?;
        replace(&path, svg.as_bytes())
    }
}

/// The checkpoints of the run in a folder.
pub(crate) fn checkpoints_in<R: RunConfig>(out: &Path) -> Checkpoints<R> {
    Checkpoints::new(out.join("checkpoints"))
}

fn remove_earlier_run<R: RunConfig>(out: &Path) -> Result<(), ReportError> {
    for file in ["metrics.jsonl", "summary.json", "loss.svg"] {
        let path = out.join(file);
        if path.exists() {
            fs::remove_file(&path).map_err(io_error(&path))?;
        }
    }
    Ok(checkpoints_in::<R>(out).remove()?)
}

/// The lines up to a step; what a killed run reported behind its last checkpoint is done, and reported, again.
fn read_metrics(path: &Path, step: u64) -> Result<Vec<Metric>, ReportError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io_error(path)(error)),
    };
    let metrics = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Metric>(line).ok());
    Ok(metrics.filter(|metric| metric.step <= step).collect())
}

fn to_json<T: Serialize>(value: &T, path: &Path) -> Result<String, ReportError> {
    serde_json::to_string(value).map_err(|error| ReportError::Io {
        path: path.display().to_string(),
        source: error.into(),
    })
}

/// Writes a file whole: readers see the old one or the new one.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), ReportError> {
    let partial = path.with_extension("partial");
    fs::write(&partial, bytes).map_err(io_error(&partial))?;
    fs::rename(&partial, path).map_err(io_error(path))
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> ReportError {
    let path = path.display().to_string();
    move |source| ReportError::Io { path, source }
}

fn draw_curves(svg: &mut String, title: &str, curves: &[(String, Vec<f64>)]) -> Result<(), String> {
    let num_steps = curves
        .iter()
        .map(|(_, losses)| losses.len())
        .max()
        .unwrap_or(0)
        .max(2);
    let finite = || {
        curves
            .iter()
            .flat_map(|(_, losses)| losses)
            .copied()
            .filter(|loss| loss.is_finite())
    };
    let highest = finite().fold(f64::MIN_POSITIVE, f64::max) * 1.05;
    let root = SVGBackend::with_string(svg, (800, 480)).into_drawing_area();
    let shown = |error: DrawingAreaErrorKind<_>| format!("{error}");
    root.fill(&WHITE).map_err(shown)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(1..num_steps, 0.0..highest)
        .map_err(shown)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("loss (nats)")
        .draw()
        .map_err(shown)?;
    for (i, (name, losses)) in curves.iter().enumerate() {
        // Later curves are thinner, so that equal ones stay visible.
        let width = if i == 0 { 4 } else { 1 };
        let color = Palette99::pick(i).mix(if i == 0 { 0.4 } else { 1.0 });
        let points = losses
            .iter()
            .enumerate()
            .map(|(step, &loss)| (step + 1, loss));
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(width)))
            .map_err(shown)?
            .label(name)
            .legend(move |(x, y)| {
                PathElement::new(vec![(x, y), (x + 18, y)], color.stroke_width(width))
            });
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()
        .map_err(shown)?;
    root.present().map_err(shown)
}
