use burn::{backend::{Flex, Autodiff}, tensor::{Distribution, Tensor, activation::softmax}};
use burn_cp_kernels::*;
use std::time::Instant;
type A = Autodiff<Flex>;
fn seg(r: std::ops::Range<usize>) -> Segment {
    Segment { q_row: 0, q: r.clone(), k_row: 0, k: r, k_position: 0, causal: true, window: None }
}
fn textbook(q: Tensor<A,4>, k: Tensor<A,4>, v: Tensor<A,4>, lens: &[usize]) -> Tensor<A,4> {
    let [_, h, _, d] = q.dims(); let kv = k.dims()[1]; let g = h / kv;
    let mut s = 0; let mut outs = vec![];
    for &n in lens {
        let take = |t: &Tensor<A,4>, h: usize| t.clone().slice([0..1, 0..h, s..s+n, 0..d]);
        let rep = |t: Tensor<A,4>| t.reshape([1, kv, 1, n, d]).expand([1, kv, g, n, d]).reshape([1, h, n, d]);
        let (q, k, v) = (take(&q, h), rep(take(&k, kv)), rep(take(&v, kv)));
        let sc = q.matmul(k.swap_dims(2,3)) * (1.0/(d as f64).sqrt());
        let mask = Tensor::<A,2,burn::tensor::Bool>::tril_mask([n,n],0,&sc.device()).unsqueeze();
        outs.push(softmax(sc.mask_fill(mask, f32::NEG_INFINITY), 3).matmul(v));
        s += n;
    }
    Tensor::cat(outs, 2)
}
fn main() {
    let dev = Default::default();
    for (name, lens, h, kv, d) in [
        ("64x30", vec![30; 64], 4, 2, 32), ("16x128", vec![128; 16], 4, 2, 32), ("10x200", vec![200; 10], 8, 2, 64),
        ("1x2048", vec![2048], 8, 2, 64), ("vision 100x16", vec![16; 100], 4, 4, 16),
    ] {
        let t: usize = lens.iter().sum();
        let r = |h| Tensor::<A,4>::random([1,h,t,d], Distribution::Normal(0.,1.), &dev).require_grad();
        let (q,k,v) = (r(h), r(kv), r(kv));
        let mut s = 0; let segs: Vec<_> = lens.iter().map(|n| { s += n; seg(s-n..s) }).collect();
        let n = segs.len();
        let segs = Segments::new(segs, (1,t),(1,t)).unwrap();
        let opt = AttentionOptions::new();
        let time = |f: &dyn Fn() -> Tensor<A,4>| {
            let mut best = (1e9f64, 1e9f64);
            for _ in 0..5 {
                let a = Instant::now(); let o = f(); let fw = a.elapsed().as_secs_f64();
                let a = Instant::now(); let _g = o.sum().backward(); let bw = a.elapsed().as_secs_f64();
                best = (best.0.min(fw), best.1.min(bw));
            } best };
        let ours = time(&|| varlen_attention(q.clone(),k.clone(),v.clone(),&segs,&opt));
        let text = time(&|| textbook(q.clone(),k.clone(),v.clone(),&lens));
        let fl = 4.0*(h*d) as f64*segs.visible_pairs() as f64/1e9;
        println!("{name}: ours {:.2}/{:.2} ms ({:.1} GF/s, {:.0}/{:.0} us/seg) textbook {:.2}/{:.2}", ours.0*1e3, ours.1*1e3, fl/ours.0, ours.0*1e6/n as f64, ours.1*1e6/n as f64, text.0*1e3, text.1*1e3);
    }
}
