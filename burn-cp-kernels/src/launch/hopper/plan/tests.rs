use std::collections::{HashMap, HashSet};

use super::*;
use crate::definition::{Segment, Window};

fn segment(q: Range<usize>, k: Range<usize>, k_position: usize) -> Segment {
    Segment {
        q_row: 0,
        q,
        k_row: 0,
        k,
        k_position,
        causal: true,
        window: None,
    }
}

fn examples() -> Vec<Segments> {
    let new = |list, q, k| Segments::new(list, (1, q), (1, k)).unwrap();
    let windowed = |segment: Segment, window| Segment {
        window: Some(window),
        ..segment
    };
    let full = |segment: Segment| Segment {
        causal: false,
        ..segment
    };
    vec![
        new(vec![segment(0..1000, 0..1000, 0)], 1003, 1500),
        new(
            vec![
                segment(3..100, 10..700, 70),
                full(segment(110..443, 0..150, 5)),
                segment(443..450, 1400..1402, 0),
                windowed(segment(460..900, 100..900, 1000), Window::left(130)),
                windowed(full(segment(900..1300, 800..1100, 64)), Window::new(0, 5)),
                segment(1300..1300, 0..5, 0),
                segment(1301..1366, 20..20, 9),
            ],
            1400,
            1500,
        ),
        new(vec![], 5, 7),
    ]
}

fn problem(segments: &Segments, heads: (usize, usize), head_dim: usize) -> AttentionProblem {
    let (batch, tokens) = segments.q_shape();
    let (k_batch, k_tokens) = segments.k_shape();
    let k = [k_batch, heads.1, k_tokens, head_dim];
    AttentionProblem::new([batch, heads.0, tokens, head_dim], k, k, segments).unwrap()
}

fn each(mut check: impl FnMut(&Segments, &AttentionProblem, usize)) {
    for segments in examples() {
        for (heads, head_dim) in [((2, 2), 64), ((4, 2), 128), ((3, 1), 64), ((4, 1), 256)] {
            for num_blocks in [1, 8, 132] {
                check(&segments, &problem(&segments, heads, head_dim), num_blocks);
            }
        }
    }
}

fn visible(segments: &Segments) -> Vec<(i32, i32)> {
    let mut pairs: Vec<_> = segments
        .iter()
        .flat_map(|s| {
            (0..s.num_q()).flat_map(move |t| {
                let keys = s.visible_keys(t);
                keys.map(move |j| ((s.q.start + t) as i32, (s.k.start + j) as i32))
            })
        })
        .collect();
    pairs.sort_unstable();
    pairs
}

#[test]
fn forward_items_hold_exactly_the_visible_pairs_of_each_head() {
    each(|segments, problem, num_blocks| {
        let plan = forward(segments, problem, num_blocks);
        assert_eq!(plan.lists.len(), num_blocks + 1);
        assert_eq!(plan.lists[num_blocks] as usize, plan.items.len());
        let keys = forward_keys(problem.head_dim) as i32;
        let (_, tokens) = segments.q_shape();
        let mut rows = HashSet::new();
        let mut pairs: HashMap<i32, Vec<(i32, i32)>> = HashMap::new();
        for i in &plan.items {
            let rest = i[15] - 64;
            let parts = [
                (i[10], i[12], i[14]),
                (i[11], i[13], i[15].min(64)),
                (i[11], i[13] + 64, rest),
            ];
            for (head, token, count) in parts {
                assert_eq!(i[2] as usize, head as usize / problem.group());
                for row in 0..count {
                    assert!(rows.insert((head, token + row)));
                    let own = i[7] + token - i[12] + row;
                    for key in 0..i[4] * keys {
                        let near = key >= own - i[8] && key <= own.saturating_add(i[9]);
                        if key >= i[5] && key < i[6] && near {
                            pairs
                                .entry(head)
                                .or_default()
                                .push((token + row, i[3] + key));
                        }
                    }
                }
            }
        }
        assert_eq!(rows.len(), tokens * problem.num_heads);
        let expected = visible(segments);
        for head in 0..problem.num_heads as i32 {
            let mut pairs = pairs.remove(&head).unwrap_or_default();
            pairs.sort_unstable();
            assert_eq!(pairs, expected);
        }
    });
}

/// How many shares a tile of queries has got before that of this tile of keys, as the kernel counts them:
/// `keys` are those that it sees, from the tile's first one on.
fn turn(keys: Range<i32>, item: &Record, size: i32) -> i32 {
    let (first, last) = (keys.start.div_euclid(size), (keys.end - 1).div_euclid(size));
    match item[10] {
        1 => -first,
        _ => item[8].max(first) - first + item[9].min(last),
    }
}

#[test]
fn backward_items_hold_exactly_the_visible_pairs_and_shares_have_one_order() {
    each(|segments, problem, num_blocks| {
        let plan = backward(segments, problem, num_blocks);
        let queries = backward_queries(problem.head_dim) as i32;
        let size = backward_keys(problem.head_dim) as i32;
        let (_, tokens) = segments.k_shape();
        let (mut rows, mut pairs) = (HashSet::new(), Vec::new());
        let mut shares: HashMap<(i32, i32), i32> = HashMap::new();
        for item in &plan.items {
            let mut steps = 0;
            if item[4] == 0 {
                (item[2]..item[3]).for_each(|row| assert!(rows.insert(item[1] + row)));
            }
            for visit in &plan.visits[item[6] as usize..item[7] as usize] {
                steps += visit[2] * problem.group() as i32;
                for tile in 0..visit[2] {
                    let [_, token, count, _] = plan.q_tiles[(visit[9] + tile) as usize];
                    assert_eq!(token, visit[1] + tile * queries);
                    assert_eq!(count, queries.min(visit[3] - tile * queries));
                    let own = visit[4] + tile * queries;
                    let seen = visit[5].max(own - visit[7])
                        ..visit[6].min((own + count).saturating_add(visit[8]));
                    let before = shares.entry((item[4], visit[9] + tile)).or_default();
                    assert_eq!(turn(seen, item, size), *before);
                    *before += 1;
                    if item[4] > 0 {
                        continue;
                    }
                    for row in 0..count {
                        for key in visit[5].max(0)..visit[6].min(size) {
                            let own = own + row;
                            if key >= own - visit[7] && key <= own.saturating_add(visit[8]) {
                                pairs.push((token + row, item[1] + key));
                            }
                        }
                    }
                }
            }
            assert_eq!(steps, item[5]);
        }
        assert_eq!(rows.len(), tokens);
        pairs.sort_unstable();
        assert_eq!(pairs, visible(segments));
    });
}

#[test]
fn tiles_of_queries_cover_every_row() {
    each(|segments, problem, num_blocks| {
        let plan = backward(segments, problem, num_blocks);
        let rows = plan
            .q_tiles
            .iter()
            .flat_map(|tile| tile[1]..tile[1] + tile[2]);
        let mut rows: Vec<i32> = rows.collect();
        rows.sort_unstable();
        assert_eq!(rows, (0..segments.q_shape().1 as i32).collect::<Vec<_>>());
    });
}

#[test]
fn few_heads_of_long_documents_are_walked_at_a_time_and_blocks_stay_balanced() {
    for (tokens, at_a_time) in [(4096, 8), (8192, 4), (16384, 2), (65536, 2)] {
        let list = vec![segment(0..tokens, 0..tokens, 0)];
        let segments = Segments::new(list, (1, tokens), (1, tokens)).unwrap();
        let problem = problem(&segments, (32, 16), 128);
        let [run] = &runs(&segments)[..] else {
            panic!("one document");
        };
        assert_eq!(heads_at_a_time(run, &problem), at_a_time);
        let plan = forward(&segments, &problem, 132);
        let load = |ends: &[i32]| {
            let items = &plan.items[ends[0] as usize..ends[1] as usize];
            items.iter().map(|item| item[4] + 1).sum::<i32>()
        };
        let loads: Vec<_> = plan.lists.windows(2).map(load).collect();
        let mean = loads.iter().sum::<i32>() as f64 / 132.0;
        let most = loads.into_iter().max().unwrap_or_default();
        assert!(f64::from(most) <= 1.01 * mean, "{tokens}: {most}, {mean}");
    }
}
