//! Ranks and their tokens, documents in colour, and arrows for what moves.

use std::{collections::BTreeMap, ops::Range, path::Path};

use burn_cp::plan::AttentionPlan;
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{
    Comparison, LayoutArg, PlanCommandError,
    scene::{Arrow, Bar, arrows, bars},
};

const WIDTH: i32 = 1500;
const LEFT: i32 = 80;
const RIGHT: i32 = 330;
const LANE: i32 = 30;
const TITLE: i32 = 56;
const LEGEND: i32 = 64;
/// More arrows than these could not be told apart; the widest are drawn.
const MAX_ARROWS: usize = 240;
/// More arrows than these are thin.
const CROWD: usize = 80;
/// More ranks than these do not fit.
const MAX_RANKS: usize = 64;

/// Told apart also by most people who see colours differently (after Okabe and Ito, 2008), with lighter and darker ones added.
const COLOURS: [RGBColor; 12] = [
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(190, 180, 40),
    RGBColor(120, 94, 160),
    RGBColor(150, 200, 140),
    RGBColor(170, 110, 60),
    RGBColor(110, 130, 140),
    RGBColor(235, 150, 150),
];
const PADDING: RGBColor = RGBColor(225, 225, 225);
const INK: RGBColor = RGBColor(40, 40, 40);

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), String>;

/// Draws the first pack in every layout, one under the other.
///
/// # Errors
/// More than 64 ranks; a file that cannot be written.
pub fn draw(comparison: &Comparison, path: &Path) -> Result<(), PlanCommandError> {
    if comparison.world_size > MAX_RANKS {
        return Err(PlanCommandError::Flag {
            flag: "svg",
            expected: "at most 64 ranks",
            got: comparison.world_size.to_string(),
        });
    }
    let plans: Vec<_> = comparison
        .plans
        .iter()
        .filter_map(|(layout, plan)| Some((*layout, plan.as_ref()?)))
        .collect();
    let pitch = pitch(comparison.world_size);
    let panel = TITLE + pitch * comparison.world_size as i32;
    let height = LEGEND + panel * plans.len() as i32;
    let drawn = || -> Drawn {
        let canvas = SVGBackend::new(path, (WIDTH as u32, height as u32)).into_drawing_area();
        canvas.fill(&WHITE).map_err(message)?;
        legend(&canvas)?;
        for (index, (layout, plan)) in plans.iter().enumerate() {
            Panel::new(plan, LEGEND + panel * index as i32 + TITLE, pitch)
                .draw(&canvas, *layout)?;
        }
        canvas.present().map_err(message)
    };
    drawn().map_err(|reason| PlanCommandError::Picture {
        path: path.to_owned(),
        reason,
    })
}

/// From one lane to the next: room for arrows where there are few lanes.
fn pitch(world_size: usize) -> i32 {
    if world_size <= 8 {
        LANE + 46
    } else {
        LANE + 26
    }
}

fn message(error: impl std::error::Error) -> String {
    error.to_string()
}

fn write(canvas: &Canvas<'_>, text: &str, at: (i32, i32), size: i32, anchor: HPos) -> Drawn {
    let style = ("sans-serif", size)
        .into_font()
        .color(&INK)
        .pos(Pos::new(anchor, VPos::Center));
    canvas
        .draw(&Text::new(text.to_owned(), at, style))
        .map_err(message)
}

fn legend(canvas: &Canvas<'_>) -> Drawn {
    let lines = [
        "A bar is a rank's shard, to scale; d3 is document 3, in one colour wherever it is; grey is padding.",
        "An arrow leads from the owner of keys and values to a rank whose queries see them; its width grows with their number, which stands at its head where there is room.",
    ];
    lines.iter().enumerate().try_for_each(|(index, line)| {
        write(canvas, line, (16, 20 + 20 * index as i32), 15, HPos::Left)
    })
}

fn colour(document: Option<usize>) -> RGBColor {
    document.map_or(PADDING, |document| COLOURS[document % COLOURS.len()])
}

struct Panel<'a> {
    plan: &'a AttentionPlan,
    top: i32,
    pitch: i32,
    /// Pixels of a token.
    scale: f64,
    bars: Vec<Vec<Bar>>,
}

impl<'a> Panel<'a> {
    fn new(plan: &'a AttentionPlan, top: i32, pitch: i32) -> Self {
        let longest = (0..plan.world_size())
            .map(|rank| plan.layout().local_len(rank))
            .max()
            .unwrap_or(1);
        Self {
            plan,
            top,
            pitch,
            scale: f64::from(WIDTH - LEFT - RIGHT) / longest as f64,
            bars: (0..plan.world_size())
                .map(|rank| bars(plan, rank))
                .collect(),
        }
    }

    fn x(&self, local: f64) -> i32 {
        LEFT + (local * self.scale).round() as i32
    }

    fn y(&self, rank: usize) -> i32 {
        self.top + self.pitch * rank as i32
    }

    fn draw(&self, canvas: &Canvas<'_>, layout: LayoutArg) -> Drawn {
        let mut arrows = arrows(self.plan, &self.bars);
        let num = arrows.len();
        arrows.truncate(MAX_ARROWS);
        let mut title = format!(
            "{}: balance of work {:.3}, K/V received {:.3} of all others' tokens",
            layout.name(),
            self.plan.balance(),
            self.plan.kv_fraction()
        );
        if arrows.len() < num {
            title.push_str(&format!(" (the widest {} of {num} arrows)", arrows.len()));
        }
        write(canvas, &title, (16, self.top - 30), 19, HPos::Left)?;
        for rank in 0..self.plan.world_size() {
            self.lane(canvas, rank)?;
        }
        self.draw_arrows(canvas, &arrows)?;
        (0..self.plan.world_size()).try_for_each(|rank| self.labels(canvas, rank))
    }

    fn lane(&self, canvas: &Canvas<'_>, rank: usize) -> Drawn {
        let y = self.y(rank);
        write(
            canvas,
            &format!("rank {rank}"),
            (16, y + LANE / 2),
            15,
            HPos::Left,
        )?;
        for bar in &self.bars[rank] {
            let (from, to) = (self.x(bar.local.start as f64), self.x(bar.local.end as f64));
            let corners = [(from, y), (to.max(from + 1), y + LANE)];
            canvas
                .draw(&Rectangle::new(
                    corners,
                    colour(bar.document).mix(0.6).filled(),
                ))
                .map_err(message)?;
            if to - from > 3 {
                canvas
                    .draw(&Rectangle::new(corners, WHITE.stroke_width(1)))
                    .map_err(message)?;
            }
        }
        let plan = self.plan.rank(rank);
        let mean = self.plan.total_area() as f64 / self.plan.world_size() as f64;
        let work = if mean > 0.0 {
            plan.area as f64 / mean
        } else {
            1.0
        };
        let text = format!(
            "{} tokens, work {work:.2}, in {}, out {}",
            plan.tokens, plan.kv_tokens_received, plan.kv_tokens_sent
        );
        write(
            canvas,
            &text,
            (WIDTH - RIGHT + 14, y + LANE / 2),
            14,
            HPos::Left,
        )
    }

    /// What the bars are, over arrows that cross them.
    fn labels(&self, canvas: &Canvas<'_>, rank: usize) -> Drawn {
        let y = self.y(rank);
        for bar in &self.bars[rank] {
            let (from, to) = (self.x(bar.local.start as f64), self.x(bar.local.end as f64));
            let Some(document) = bar.document else {
                continue;
            };
            let short = format!("d{document}");
            let long = format!(
                "{short}  {}..{}",
                bar.position,
                bar.position + bar.local.len()
            );
            let room = |text: &str, size: i32| 6 * size / 10 * text.len() as i32 + 6 <= to - from;
            let text = [(long, 13), (short.clone(), 13), (short, 11)]
                .into_iter()
                .find(|(text, size)| room(text, *size));
            if let Some((text, size)) = text {
                write(
                    canvas,
                    &text,
                    ((from + to) / 2, y + LANE / 2),
                    size,
                    HPos::Center,
                )?;
            }
        }
        Ok(())
    }

    fn draw_arrows(&self, canvas: &Canvas<'_>, arrows: &[Arrow]) -> Drawn {
        let most = arrows.first().map_or(1, |arrow| arrow.num_tokens) as f64;
        let widest = if arrows.len() > CROWD { 1.5 } else { 4.0 };
        // Where several end at one bar, side by side.
        let mut ends: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
        for (index, arrow) in arrows.iter().enumerate() {
            ends.entry((arrow.destination, arrow.document))
                .or_default()
                .push(index);
        }
        for here in ends.values_mut() {
            here.sort_by_key(|&index| arrows[index].source);
            let step = 1.0 / (here.len() + 1) as f64;
            for (place, &index) in here.iter().enumerate() {
                let share = (place + 1) as f64 * step;
                self.arrow(canvas, &arrows[index], (share, step), (most, widest))?;
            }
        }
        Ok(())
    }

    fn arrow(
        &self,
        canvas: &Canvas<'_>,
        arrow: &Arrow,
        (share, step): (f64, f64),
        (most, widest): (f64, f64),
    ) -> Drawn {
        let down = arrow.source < arrow.destination;
        let bars = &self.bars[arrow.destination];
        let longest = bars
            .iter()
            .filter(|bar| bar.document == Some(arrow.document))
            .max_by_key(|bar| bar.local.len());
        let Some(end) = longest else { return Ok(()) };
        let along =
            |run: &Range<usize>, share: f64| self.x(run.start as f64 + run.len() as f64 * share);
        let (lower, upper) = (self.y(arrow.source) + LANE, self.y(arrow.source));
        let from = (along(&arrow.local, share), if down { lower } else { upper });
        let y = self.y(arrow.destination);
        let to = (
            along(&end.local, share),
            if down { y - 1 } else { y + LANE + 1 },
        );
        let width = 1 + (widest * (arrow.num_tokens as f64 / most).sqrt()).round() as u32;
        let RGBColor(r, g, b) = colour(Some(arrow.document));
        let dark = RGBColor(r / 4 * 3, g / 4 * 3, b / 4 * 3);
        let head = 5 + width as i32;
        let sign = if down { 1 } else { -1 };
        let neck = (to.0, to.1 - sign * head);
        canvas
            .draw(&PathElement::new(
                curve(from, neck),
                dark.mix(0.7).stroke_width(width),
            ))
            .map_err(message)?;
        let side = 3 + width as i32;
        let tip = vec![(to.0, to.1), (to.0 - side, neck.1), (to.0 + side, neck.1)];
        canvas
            .draw(&Polygon::new(tip, dark.filled()))
            .map_err(message)?;
        let number = arrow.num_tokens.to_string();
        let room = end.local.len() as f64 * self.scale * step;
        if room < 7.0 * number.len() as f64 + f64::from(side) + 4.0 {
            return Ok(());
        }
        write(canvas, &number, (to.0 + side + 2, neck.1), 11, HPos::Left)
    }
}

/// A cubic Bézier curve that leaves and arrives vertically.
fn curve(from: (i32, i32), to: (i32, i32)) -> Vec<(i32, i32)> {
    let bend = f64::from(to.1 - from.1) / 2.0;
    let (x0, y0, x1, y1) = (
        f64::from(from.0),
        f64::from(from.1),
        f64::from(to.0),
        f64::from(to.1),
    );
    (0..=24)
        .map(|step| {
            let t = f64::from(step) / 24.0;
            let s = 1.0 - t;
            let weights = [s * s * s, 3.0 * s * s * t, 3.0 * s * t * t, t * t * t];
            let x = (weights[0] + weights[1]) * x0 + (weights[2] + weights[3]) * x1;
            let y = weights[0] * y0
                + weights[1] * (y0 + bend)
                + weights[2] * (y1 - bend)
                + weights[3] * y1;
            (x.round() as i32, y.round() as i32)
        })
        .collect()
}
