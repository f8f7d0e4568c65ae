//! Tensors and views: what goes up comes back, whatever its size, type and place; and what may not be bound is refused.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)]

mod support;

use half::{bf16, f16};
use std::fmt::Debug;
use support::{Guarded, Random, gpu, run};
use wgpu_attention::bench::PEAK_KERNELS;
use wgpu_attention::compare::{Tolerance, compare};
use wgpu_attention::kernels::{
    APPEND_PARAMS, ATTENTION_PARAMS, COPY_PARAMS, Fragment, KERNELS, LINEAR_PARAMS, MERGE_PARAMS,
    Operation, PEAK_PARAMS, ParamsLayout,
};
use wgpu_attention::reference::{self, widen};
use wgpu_attention::*;

fn expect(label: &str, got: &[f32], expected: &[f64]) {
    let shape = [expected.len()];
    let comparison = compare(got, &[got.len()], expected, &shape, Tolerance::F32);
    assert!(comparison.passed(), "{label}: {comparison}");
}

fn f32s(gpu: &Gpu, shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_slice(gpu, shape, values).unwrap()
}

// ---- round trips ----

fn round_trip<T: Element + PartialEq + Debug>(gpu: &Gpu, value: impl Fn(usize) -> T) {
    for shape in [
        &[][..],
        &[1],
        &[2],
        &[3],
        &[5],
        &[15],
        &[5, 5],
        &[7, 11],
        &[3, 1, 7],
        &[1027],
        &[0],
        &[3, 0, 2],
        &[0, usize::MAX, usize::MAX],
    ] {
        let count = if shape.contains(&0) {
            0
        } else {
            shape.iter().product()
        };
        let values: Vec<T> = (0..count).map(&value).collect();
        let tensor = Tensor::from_slice(gpu, shape, &values).unwrap();
        assert_eq!((tensor.shape(), tensor.element_type()), (shape, T::TYPE));
        assert_eq!(tensor.view().elements(), count as u64);
        assert_eq!(
            tensor.read_blocking::<T>().unwrap(),
            values,
            "{} {shape:?}",
            T::TYPE
        );
        assert_eq!(
            tensor.view().read_blocking::<T>().unwrap(),
            values,
            "{} {shape:?}",
            T::TYPE
        );
        // Written again, in part by another view of the same memory.
        let changed: Vec<T> = (0..count).map(|at| value(at + 1)).collect();
        tensor.reshape(&[count]).unwrap().write(&changed).unwrap();
        assert_eq!(
            tensor.read_blocking::<T>().unwrap(),
            changed,
            "{} {shape:?}",
            T::TYPE
        );
    }
}

/// cubecl#564: sizes that are no multiple of 4 bytes.
#[test]
fn what_goes_up_comes_back() {
    let Some(gpu) = gpu() else { return };
    round_trip::<f32>(&gpu, |at| at as f32 - 7.5);
    round_trip::<f16>(&gpu, |at| f16::from_f32(at as f32 * 0.25 - 3.0));
    round_trip::<bf16>(&gpu, |at| bf16::from_f32(at as f32 * 0.5 - 1.0));
    round_trip::<bool>(&gpu, |at| (at * at / 3) % 2 == 1);
    // NaNs, infinities, subnormals and the sign of zero travel as they are.
    let bits = [
        0x7fc0_0001u32,
        0xff80_0000,
        0x7f80_0000,
        1,
        0x8000_0000,
        0x7f7f_ffff,
        0xffff_ffff,
    ];
    let values = bits.map(f32::from_bits);
    let back = f32s(&gpu, &[7], &values).read_blocking::<f32>().unwrap();
    assert_eq!(
        back.iter().map(|value| value.to_bits()).collect::<Vec<_>>(),
        bits
    );
}

#[test]
fn a_new_tensor_holds_zeros() {
    let Some(gpu) = gpu() else { return };
    for _ in 0..3 {
        support::leave_dirt(&gpu, 1000);
        let tensor = Tensor::empty(&gpu, &[10, 100], ElementType::F32).unwrap();
        assert_eq!(tensor.read_blocking::<f32>().unwrap(), [0.0; 1000]);
        let mask = Tensor::empty(&gpu, &[13], ElementType::Bool).unwrap();
        assert_eq!(mask.read_blocking::<bool>().unwrap(), [false; 13]);
    }
}

// ---- views ----

/// A view on the host: for each place, which element of the tensor lies there. Worked out index by index, without strides.
#[derive(Clone)]
struct Model {
    shape: Vec<usize>,
    elements: Vec<usize>,
}

impl Model {
    fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
        shape.iter().fold(vec![vec![]], |indices, size| {
            let longer = |index: &Vec<usize>| {
                let index = index.clone();
                (0..*size).map(move |last| index.iter().copied().chain([last]).collect())
            };
            indices.iter().flat_map(longer).collect()
        })
    }

    fn at(&self, index: &[usize]) -> usize {
        let place = index
            .iter()
            .zip(&self.shape)
            .fold(0, |place, (i, size)| place * size + i);
        self.elements[place]
    }

    fn slice(&self, axis: usize, from: usize, to: usize) -> Model {
        let mut shape = self.shape.clone();
        shape[axis] = to - from;
        let elements = Self::indices(&shape).into_iter().map(|mut index| {
            index[axis] += from;
            self.at(&index)
        });
        Model {
            elements: elements.collect(),
            shape,
        }
    }

    fn permute(&self, order: &[usize]) -> Model {
        let shape: Vec<usize> = order.iter().map(|axis| self.shape[*axis]).collect();
        let elements = Self::indices(&shape).into_iter().map(|index| {
            let mut source = vec![0; order.len()];
            for (to, from) in order.iter().enumerate() {
                source[*from] = index[to];
            }
            self.at(&source)
        });
        Model {
            elements: elements.collect(),
            shape,
        }
    }

    fn split(&self, axis: usize, sizes: &[usize]) -> Model {
        let mut shape = self.shape.clone();
        shape.splice(axis..=axis, sizes.iter().copied());
        Model {
            shape,
            elements: self.elements.clone(),
        }
    }
}

#[test]
fn any_view_reads_what_an_index_by_index_model_reads() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random::new(42);
    let (mut empty, mut odd_places) = (0, 0);
    for case in 0..120 {
        let shape: Vec<usize> = (0..1 + random.below(4))
            .map(|_| [1, 2, 3, 4, 6][random.below(5)])
            .collect();
        let count: usize = shape.iter().product();
        let mut model = Model {
            elements: (0..count).collect(),
            shape: shape.clone(),
        };
        let floats: Vec<f32> = (0..count).map(|at| at as f32).collect();
        let halves: Vec<f16> = floats.iter().map(|value| f16::from_f32(*value)).collect();
        let brains: Vec<bf16> = (0..count)
            .map(|at| bf16::from_f32((at % 200) as f32))
            .collect();
        let bools = random.bools(count);
        let mut views = [
            f32s(&gpu, &shape, &floats).view(),
            Tensor::from_slice(&gpu, &shape, &halves).unwrap().view(),
            Tensor::from_slice(&gpu, &shape, &brains).unwrap().view(),
            Tensor::from_slice(&gpu, &shape, &bools).unwrap().view(),
        ];
        let mut steps = format!("{shape:?}");
        for _ in 0..random.below(5) {
            let axis = random.below(model.shape.len());
            let size = model.shape[axis];
            match random.below(3) {
                0 => {
                    let from = random.below(size + 1);
                    let to = from + random.below(size - from + 1);
                    steps += &format!(" slice({axis}, {from}..{to})");
                    model = model.slice(axis, from, to);
                    views = views.map(|view| view.slice(axis, from..to).unwrap());
                }
                1 => {
                    let mut order: Vec<usize> = (0..model.shape.len()).collect();
                    for at in (1..order.len()).rev() {
                        order.swap(at, random.below(at + 1));
                    }
                    steps += &format!(" permute({order:?})");
                    model = model.permute(&order);
                    views = views.map(|view| view.permute(&order).unwrap());
                }
                _ => {
                    let inner = [1, 2, 3][random.below(3)];
                    if !size.is_multiple_of(inner) {
                        continue;
                    }
                    let sizes = [size / inner, inner];
                    steps += &format!(" split_axis({axis}, {sizes:?})");
                    model = model.split(axis, &sizes);
                    views = views.map(|view| view.split_axis(axis, &sizes).unwrap());
                }
            }
        }
        let label = format!("case {case}: {steps}");
        for view in &views {
            assert_eq!(view.shape(), model.shape, "{label}");
        }
        fn picked<T: Copy>(model: &Model, values: &[T]) -> Vec<T> {
            model.elements.iter().map(|at| values[*at]).collect()
        }
        assert_eq!(
            views[0].read_blocking::<f32>().unwrap(),
            picked(&model, &floats),
            "{label}"
        );
        assert_eq!(
            views[1].read_blocking::<f16>().unwrap(),
            picked(&model, &halves),
            "{label}"
        );
        assert_eq!(
            views[2].read_blocking::<bf16>().unwrap(),
            picked(&model, &brains),
            "{label}"
        );
        assert_eq!(
            views[3].read_blocking::<bool>().unwrap(),
            picked(&model, &bools),
            "{label}"
        );
        empty += usize::from(model.elements.is_empty());
        odd_places +=
            usize::from(!model.elements.is_empty() && !views[3].offset().is_multiple_of(4));
    }
    assert!(
        empty > 3 && odd_places > 3,
        "{empty} empty views, {odd_places} at odd places: too few to show anything"
    );
}

#[test]
fn a_view_keeps_its_memory_alive() {
    let Some(gpu) = gpu() else { return };
    let view = f32s(&gpu, &[4], &[1.0, 2.0, 3.0, 4.0])
        .view()
        .slice(0, 1..3)
        .unwrap();
    support::leave_dirt(&gpu, 4);
    assert_eq!(view.read_blocking::<f32>().unwrap(), [2.0, 3.0]);
}

#[test]
fn wrong_calls_on_tensors_are_typed_errors() {
    let Some(gpu) = gpu() else { return };
    let tensor = f32s(&gpu, &[2, 6], &[0.0; 12]);
    let view = tensor.view();
    let shape = |result: Result<()>, text: &str| match result {
        Err(error @ Error::Shape { .. }) => assert_eq!(error.to_string(), text),
        other => panic!("{text}: {other:?}"),
    };
    shape(
        view.slice(2, 0..1).map(drop),
        "axis: expected below 2 for the shape (2, 6), got 2",
    );
    shape(
        view.slice(1, 3..7).map(drop),
        "range of axis 1: expected within 0..6, got 3..7",
    );
    #[allow(clippy::reversed_empty_ranges)]
    shape(
        view.slice(1, 5..4).map(drop),
        "range of axis 1: expected within 0..6, got 5..4",
    );
    shape(
        view.split_axis(1, &[2, 2]).map(drop),
        "sizes of axis 1: expected a product of 6, got (2, 2)",
    );
    shape(
        view.split_axis(0, &[]).map(drop),
        "sizes of axis 0: expected a product of 2, got ()",
    );
    shape(
        view.permute(&[0]).map(drop),
        "order: expected each of 0..2 once, got [0]",
    );
    shape(
        view.permute(&[1, 1]).map(drop),
        "order: expected each of 0..2 once, got [1, 1]",
    );
    shape(
        tensor.reshape(&[5]).map(drop),
        "shape: expected 12 elements as in (2, 6), got 5 in (5)",
    );
    shape(
        tensor.write(&[0.0f32; 11]),
        "values: expected 12 elements, got 11",
    );
    let long = Tensor::from_slice(&gpu, &[2, 2], &[1.0f32; 5]).map(drop);
    assert!(matches!(long, Err(Error::Shape { .. })), "{long:?}");
    let types = |result: Result<()>, text: &str| match result {
        Err(error @ Error::Type { .. }) => assert_eq!(error.to_string(), text),
        other => panic!("{text}: {other:?}"),
    };
    types(
        tensor.read_blocking::<f16>().map(drop),
        "tensor: expected element type f16, got f32",
    );
    types(
        view.read_blocking::<bool>().map(drop),
        "tensor: expected element type bool, got f32",
    );
    types(
        tensor.write(&[false; 12]),
        "values: expected element type bool, got f32",
    );
}

// ---- outputs ----

fn same_buffer<T: Debug>(label: &str, result: Result<T>) {
    match result {
        Err(Error::Layout { problem, .. }) => {
            assert!(problem.contains("same buffer"), "{label}: {problem}")
        }
        other => panic!("{label}: {other:?}"),
    }
}

#[test]
fn an_output_in_the_buffer_of_an_input_is_refused() {
    let Some(gpu) = gpu() else { return };
    // Large enough for all, so that the ranges themselves do not overlap.
    let whole = f32s(&gpu, &[1000], &[0.5; 1000]);
    let part = |from: u64, shape: &[usize]| {
        let tensor = Tensor::from_buffer(
            &gpu,
            whole.buffer().clone(),
            4 * from,
            shape,
            ElementType::F32,
        );
        tensor.unwrap().view()
    };
    let other = |shape: &[usize], ty| Tensor::empty(&gpu, shape, ty).unwrap().view();
    let f32 = ElementType::F32;
    let mut encoder = gpu.device().create_command_encoder(&Default::default());

    let linear = Linear::new(
        &gpu,
        LinearProblem {
            batch: 1,
            tokens: 2,
            d_in: 4,
            d_out: 4,
            form: None,
            few: None,
        },
    )
    .unwrap();
    for shared in 0..3 {
        let on = |at: usize, shape: &[usize]| {
            if at == shared {
                part(300, shape)
            } else {
                other(shape, f32)
            }
        };
        let arguments = LinearArguments {
            x: &on(0, &[1, 2, 4]),
            weight: &on(1, &[4, 4]),
            bias: Some(&on(2, &[4])),
            y: &part(0, &[1, 2, 4]),
        };
        same_buffer(
            &format!("linear input {shared}"),
            linear.encode(&mut encoder, arguments),
        );
    }
    let problem = AttentionProblem {
        rules: AttentionRules {
            mask: true,
            ..Default::default()
        },
        ..AttentionProblem::new(1, 1, 2, 4)
    };
    let attention = Attention::new(&gpu, problem.clone()).unwrap();
    for shared in 0..4 {
        let on = |at: usize| {
            if at == shared {
                part(300, &[1, 2, 1, 4])
            } else {
                other(&[1, 2, 1, 4], f32)
            }
        };
        let mask = Tensor::from_buffer(
            &gpu,
            whole.buffer().clone(),
            2000,
            &[1, 1, 1, 2],
            ElementType::Bool,
        )
        .unwrap()
        .view();
        let mask = if shared == 3 {
            mask
        } else {
            other(&[1, 1, 1, 2], ElementType::Bool)
        };
        let [q, k, v] = [on(0), on(1), on(2)];
        let out = part(0, &[1, 2, 1, 4]);
        let arguments = AttentionArguments {
            rules: RuleArguments {
                mask: Some(&mask),
                ..Default::default()
            },
            ..AttentionArguments::new(&q, &k, &v, &out)
        };
        same_buffer(
            &format!("attention input {shared}"),
            attention.encode(&mut encoder, arguments),
        );
    }
    gpu.submit(encoder.finish()).unwrap();
    assert_eq!(
        whole.read_blocking::<f32>().unwrap(),
        [0.5; 1000],
        "nothing was written"
    );
}

/// In a layer no dispatch reads x and writes y: one buffer may hold both. The last dispatch's own inputs may not be there.
#[test]
fn a_layer_may_write_beside_its_input() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random::new(3);
    let (qkv, output, x) = (random.normals(48), random.normals(16), random.normals(8));
    let qkv = QkvWeights::Fused(Projection::new(&qkv));
    let config = LayerConfig::new(4, 4, 2);
    for projected in [true, false] {
        let weights = LayerWeights {
            qkv,
            output: projected.then(|| Projection::new(&output)),
        };
        let layer = MultiHeadAttention::new(&gpu, config.clone(), &weights).unwrap();
        let expected = layer.forward_host_blocking(&x, 1, 2, None).unwrap();
        let plan = layer.plan(LayerShape::new(1, 2)).unwrap();
        let both = f32s(&gpu, &[2, 2, 4], &[&x[..], &[f32::NAN; 8]].concat());
        let half = |at: usize| both.view().slice(0, at..at + 1).unwrap();
        run(&gpu, |encoder| {
            let (x_view, y_view) = (half(0), half(1));
            let arguments = LayerArguments::new(&x_view, &y_view);
            layer.encode(encoder, &plan, arguments).unwrap();
        });
        let got = both.read_blocking::<f32>().unwrap();
        assert_eq!((&got[..8], &got[8..]), (&x[..], &expected[..]));
    }

    // y where the output weights are, and, where the attention writes y, where the mask is.
    let weight = |shape: &[usize]| Tensor::empty(&gpu, shape, ElementType::F32).unwrap();
    let (shared, x) = (weight(&[4, 4]), weight(&[1, 2, 4]).view());
    let y = Tensor::from_buffer(
        &gpu,
        shared.buffer().clone(),
        0,
        &[1, 2, 4],
        ElementType::F32,
    );
    let y = y.unwrap().view();
    let qkv = QkvTensors::Fused(ProjectionTensors::new(weight(&[12, 4]).view()));
    let output = ProjectionTensors::new(shared.view());
    let layer =
        MultiHeadAttention::from_tensors(&gpu, config.clone(), qkv.clone(), Some(output)).unwrap();
    let plan = layer.plan(LayerShape::new(1, 2)).unwrap();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let arguments = LayerArguments::new(&x, &y);
    same_buffer("weight", layer.encode(&mut encoder, &plan, arguments));
    let layer = MultiHeadAttention::from_tensors(&gpu, config, qkv, None).unwrap();
    let plan = layer.plan(LayerShape::new(1, 2).mask(true)).unwrap();
    let mask = Tensor::from_buffer(
        &gpu,
        shared.buffer().clone(),
        60,
        &[1, 2],
        ElementType::Bool,
    );
    let mask = mask.unwrap().view();
    let arguments = LayerArguments {
        key_mask: Some(&mask),
        ..LayerArguments::new(&x, &y)
    };
    same_buffer("mask", layer.encode(&mut encoder, &plan, arguments));
}

// ---- binding ----

/// onnxruntime#27853: 16 bytes a batch item, none of which begins at a multiple of 256.
#[test]
fn views_may_begin_anywhere() {
    let Some(gpu) = gpu() else { return };
    let values = Random::new(1).normals(3 * 4);
    let (q, k) = (
        f32s(&gpu, &[3, 1, 1, 4], &values).view(),
        f32s(&gpu, &[3, 1, 1, 4], &values).view(),
    );
    let v = f32s(&gpu, &[3, 1, 1, 4], &values).view();
    let out = Guarded::new(&gpu, &[3, 1, 1, 4]);
    let attention = Attention::new(&gpu, AttentionProblem::new(1, 1, 1, 4)).unwrap();
    run(&gpu, |encoder| {
        for item in 0..3 {
            let of = |view: &TensorView| view.slice(0, item..item + 1).unwrap();
            attention
                .encode(
                    encoder,
                    AttentionArguments::new(&of(&q), &of(&k), &of(&v), &of(&out.tensor.view())),
                )
                .unwrap();
        }
    });
    // One key: the output is its value.
    assert_eq!(out.read().unwrap(), values);

    // A mask that begins at each byte of a word, and then some.
    let attention = Attention::new(
        &gpu,
        AttentionProblem {
            rules: AttentionRules {
                mask: true,
                ..Default::default()
            },
            ..AttentionProblem::new(1, 1, 3, 4)
        },
    );
    let attention = attention.unwrap();
    let zeros = f32s(&gpu, &[1, 3, 1, 4], &[0.0; 12]).view();
    let v: Vec<f32> = (0..12).map(|at| (at / 4) as f32).collect();
    let v = f32s(&gpu, &[1, 3, 1, 4], &v).view();
    let bytes = Random::new(9).bools(300);
    let masks = Tensor::from_slice(&gpu, &[1, 300], &bytes).unwrap().view();
    for from in [0, 1, 2, 3, 4, 63, 253, 254, 255, 256, 257, 297] {
        let out = Guarded::new(&gpu, &[1, 3, 1, 4]);
        run(&gpu, |encoder| {
            let mask = masks.slice(1, from..from + 3).unwrap();
            attention
                .encode(
                    encoder,
                    AttentionArguments {
                        rules: RuleArguments {
                            mask: Some(&mask),
                            ..Default::default()
                        },
                        ..AttentionArguments::new(&zeros, &zeros, &v, &out.tensor.view())
                    },
                )
                .unwrap();
        });
        let seen: Vec<f64> = (0..3)
            .filter(|key| bytes[from + key])
            .map(|key| key as f64)
            .collect();
        let mean = if seen.is_empty() {
            0.0
        } else {
            seen.iter().sum::<f64>() / seen.len() as f64
        };
        expect(
            &format!("mask from byte {from}"),
            &out.read().unwrap(),
            &[mean; 12],
        );
    }
}

/// wgpu#8470: one tensor bound three times.
#[test]
fn one_tensor_may_be_query_key_and_value() {
    let Some(gpu) = gpu() else { return };
    let (tokens, heads, head_dim) = (13, 2, 5);
    let values = Random::new(2).normals(tokens * heads * head_dim);
    let x = f32s(&gpu, &[1, tokens, heads, head_dim], &values).view();
    let out = Guarded::new(&gpu, &[1, tokens, heads, head_dim]);
    let attention =
        Attention::new(&gpu, AttentionProblem::new(1, heads, tokens, head_dim)).unwrap();
    run(&gpu, |encoder| {
        attention
            .encode(
                encoder,
                AttentionArguments::new(&x, &x, &x, &out.tensor.view()),
            )
            .unwrap();
    });
    let wide = widen(&values);
    let inputs = reference::AttentionInputs {
        batch: 1,
        heads,
        q_len: tokens,
        kv_len: tokens,
        head_dim,
        q: &wide,
        k: &wide,
        v: &wide,
        ..Default::default()
    };
    expect(
        "q = k = v",
        &out.read().unwrap(),
        &reference::attention(&inputs).unwrap().out,
    );
    // And a projection of a tensor with itself: y = x xᵀ.
    let linear = Linear::new(
        &gpu,
        LinearProblem {
            batch: 1,
            tokens: 3,
            d_in: 4,
            d_out: 3,
            form: None,
            few: None,
        },
    )
    .unwrap();
    let x = f32s(&gpu, &[3, 4], &Random::new(3).normals(12));
    let y = linear
        .forward(&x.reshape(&[1, 3, 4]).unwrap(), &x, None)
        .unwrap();
    let wide = widen(&x.read_blocking::<f32>().unwrap());
    let expected = reference::linear(&wide, 3, 4, &wide, None, 3).unwrap();
    expect(
        "x times itself",
        &y.read_blocking::<f32>().unwrap(),
        &expected,
    );
}

/// wgpu#1173: nothing that is empty is bound.
#[test]
fn empty_operands_work() {
    let Some(gpu) = gpu() else { return };
    let empty = |shape: &[usize], ty| Tensor::empty(&gpu, shape, ty).unwrap().view();
    let f32 = ElementType::F32;
    for masked in [false, true] {
        // No keys: every row is 0, and every row is written.
        let problem = AttentionProblem {
            kv_len: 0,
            rules: AttentionRules {
                mask: masked,
                ..Default::default()
            },
            ..AttentionProblem::new(2, 3, 5, 4)
        };
        let attention = Attention::new(&gpu, problem.clone()).unwrap();
        let q = f32s(&gpu, &[2, 5, 3, 4], &Random::new(4).normals(120)).view();
        let out = Guarded::new(&gpu, &[2, 5, 3, 4]);
        let mask = empty(&[2, 1, 1, 0], ElementType::Bool);
        run(&gpu, |encoder| {
            let k = empty(&[2, 0, 3, 4], f32);
            attention
                .encode(
                    encoder,
                    AttentionArguments {
                        rules: RuleArguments {
                            mask: masked.then_some(&mask),
                            ..Default::default()
                        },
                        ..AttentionArguments::new(&q, &k, &k, &out.tensor.view())
                    },
                )
                .unwrap();
        });
        assert_eq!(out.read().unwrap(), [0.0; 120], "masked {masked}");
        // No queries, no batch: nothing is dispatched.
        for (batch, q_len) in [(0, 5), (2, 0)] {
            let problem = AttentionProblem {
                batch,
                q_len,
                kv_len: 4,
                rules: AttentionRules {
                    mask: masked,
                    ..Default::default()
                },
                ..problem.clone()
            };
            let attention = Attention::new(&gpu, problem.clone()).unwrap();
            assert_eq!(attention.plan().grid, None);
            run(&gpu, |encoder| {
                let k = empty(&[batch, 4, 3, 4], f32);
                let mask = empty(&[batch, 1, 1, 4], ElementType::Bool);
                attention
                    .encode(
                        encoder,
                        AttentionArguments {
                            rules: RuleArguments {
                                mask: masked.then_some(&mask),
                                ..Default::default()
                            },
                            ..AttentionArguments::new(
                                &empty(&[batch, q_len, 3, 4], f32),
                                &k,
                                &k,
                                &empty(&[batch, q_len, 3, 4], f32),
                            )
                        },
                    )
                    .unwrap();
            });
        }
    }
    // No channels go in: y is the bias. No bias: y is 0. No rows or no channels come out: nothing.
    for bias in [None, Some(f32s(&gpu, &[3], &[1.0, -2.0, 3.0]).view())] {
        let linear = Linear::new(
            &gpu,
            LinearProblem {
                batch: 1,
                tokens: 2,
                d_in: 0,
                d_out: 3,
                form: None,
                few: None,
            },
        )
        .unwrap();
        let y = Guarded::new(&gpu, &[1, 2, 3]);
        run(&gpu, |encoder| {
            let arguments = LinearArguments {
                x: &empty(&[1, 2, 0], f32),
                weight: &empty(&[3, 0], f32),
                bias: bias.as_ref(),
                y: &y.tensor.view(),
            };
            linear.encode(encoder, arguments).unwrap();
        });
        let row = if bias.is_some() {
            [1.0, -2.0, 3.0]
        } else {
            [0.0; 3]
        };
        assert_eq!(y.read().unwrap(), row.repeat(2));
    }
    for (tokens, d_out) in [(0, 3), (2, 0)] {
        let linear = Linear::new(
            &gpu,
            LinearProblem {
                batch: 1,
                tokens,
                d_in: 4,
                d_out,
                form: None,
                few: None,
            },
        )
        .unwrap();
        let x = Tensor::empty(&gpu, &[1, tokens, 4], f32).unwrap();
        let weight = Tensor::empty(&gpu, &[d_out, 4], f32).unwrap();
        let y = linear.forward(&x, &weight, None).unwrap();
        assert!(y.read_blocking::<f32>().unwrap().is_empty());
    }
}

// ---- parameters ----

/// wgpu-rs#36: every field arrives in the member of its name.
#[test]
fn every_parameter_arrives_under_its_own_name() {
    let Some(gpu) = gpu() else { return };
    let mut echoed = 0;
    for kernel in KERNELS.iter().chain(PEAK_KERNELS) {
        let fragment = match kernel.operation {
            Operation::Attention | Operation::Decode | Operation::Weights => &ATTENTION_PARAMS,
            Operation::Linear | Operation::LinearFew => &LINEAR_PARAMS,
            Operation::Merge => &MERGE_PARAMS,
            Operation::Copy => &COPY_PARAMS,
            Operation::Append => &APPEND_PARAMS,
            Operation::Peak => &PEAK_PARAMS,
        };
        let got = echo(&gpu, fragment, &kernel.params);
        let expected: Vec<u32> = (0..kernel.params.fields.len() as u32).map(number).collect();
        for ((field, got), expected) in kernel.params.fields.iter().zip(got).zip(expected) {
            assert_eq!(
                got, expected,
                "{} {}.{}",
                kernel.name, kernel.params.name, field.name
            );
            echoed += 1;
        }
    }
    assert!(echoed > 250, "only {echoed} fields");
}

/// What field `at` is set to. (Read as a float it is an ordinary number, which no driver flushes.)
fn number(at: u32) -> u32 {
    0x4000_0000 + 0x1_0001 * (at + 1)
}

/// Each field of the struct by its name in WGSL, when it was written at its offset in Rust.
fn echo(gpu: &Gpu, fragment: &Fragment, layout: &ParamsLayout) -> Vec<u32> {
    let mut bytes = vec![0u8; layout.size];
    let mut body = String::new();
    for (at, field) in layout.fields.iter().enumerate() {
        assert_eq!(field.ty.len(), 3, "{} is not a word", field.ty);
        bytes[field.offset..field.offset + 4].copy_from_slice(&number(at as u32).to_le_bytes());
        body += &format!("    seen[{at}u] = bitcast<u32>(params.{});\n", field.name);
    }
    let source = format!(
        "{}\n@group(0) @binding(0)\nvar<uniform> params: {};\n@group(0) @binding(1)\n\
         var<storage, read_write> seen: array<u32>;\n\n@compute @workgroup_size(1)\nfn echo() {{\n{body}}}\n",
        fragment.source, layout.name
    );
    let device = gpu.device();
    let buffer = |size: usize, usage| {
        device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: size as u64,
            usage,
            mapped_at_creation: false,
        })
    };
    let uniform = buffer(
        layout.size.next_multiple_of(16),
        wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
    );
    gpu.queue().write_buffer(&uniform, 0, &bytes);
    let seen = buffer(
        4 * layout.fields.len(),
        wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC,
    );
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some("echo"),
        source: wgpu::ShaderSource::Wgsl(source.into()),
    });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some("echo"),
        layout: None,
        module: &module,
        entry_point: Some("echo"),
        compilation_options: Default::default(),
        cache: None,
    });
    let bind_group = device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[
            wgpu::BindGroupEntry {
                binding: 0,
                resource: uniform.as_entire_binding(),
            },
            wgpu::BindGroupEntry {
                binding: 1,
                resource: seen.as_entire_binding(),
            },
        ],
    });
    run(gpu, |encoder| {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &bind_group, &[]);
        pass.dispatch_workgroups(1, 1, 1);
    });
    let seen = Tensor::from_buffer(gpu, seen, 0, &[layout.fields.len()], ElementType::F32).unwrap();
    seen.read_blocking::<f32>()
        .unwrap()
        .into_iter()
        .map(f32::to_bits)
        .collect()
}
