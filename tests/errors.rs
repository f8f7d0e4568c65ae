//! What goes wrong says what, what was expected, what was there and what to do; and nothing that a caller passes panics.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use support::{Random, gpu, open};
use wgpu_attention::kernels::{Configuration, Form, Kernel};
use wgpu_attention::*;

/// The error, when it is of the kind expected and its text is exactly that.
fn says(result: Result<()>, kind: &str, text: &str) {
    let error = result.expect_err(text);
    assert_eq!(error.to_string(), text);
    assert_eq!(kind_of(&error), kind, "{text}");
}

fn kind_of(error: &Error) -> &'static str {
    match error {
        Error::AdapterNotFound { .. } => "adapter not found",
        Error::MissingFeature { .. } => "missing feature",
        Error::LimitExceeded { .. } => "limit",
        Error::Shape { .. } => "shape",
        Error::Type { .. } => "type",
        Error::Parameter { .. } => "parameter",
        Error::Layout { .. } => "layout",
        Error::OtherDevice { .. } => "other device",
        Error::Shader { .. } => "shader",
        Error::Validation { .. } => "validation",
        Error::Io { .. } => "io",
        Error::Format { .. } => "format",
        _ => "another",
    }
}

fn capabilities() -> Capabilities {
    Capabilities::webgpu_defaults(wgpu::DeviceType::DiscreteGpu)
}

// ---- without a GPU ----

/// keras-team/keras#23081, pytorch/pytorch#141218: what does not fit together is refused with both numbers.
#[test]
fn plans_say_what_is_wrong_with_rules() {
    let refused = |change: fn(&mut AttentionProblem), kind: &str, text: &str| {
        let mut problem = AttentionProblem::new(1, 6, 8, 16);
        change(&mut problem);
        says(problem.plan(&capabilities()).map(drop), kind, text);
    };
    refused(
        |p| p.kv_heads = 4,
        "parameter",
        "heads = 6: must be a multiple of kv_heads = 4",
    );
    refused(
        |p| p.kv_heads = 12,
        "parameter",
        "heads = 6: must be a multiple of kv_heads = 12",
    );
    refused(
        |p| p.kv_heads = 0,
        "parameter",
        "kv_heads = 0: must be at least 1",
    );
    refused(
        |p| p.value_dim = 0,
        "parameter",
        "value_dim = 0: must be at least 1",
    );
    for softcap in [0.0, -1.0, 1e-31, 1e31, f32::NAN, f32::INFINITY] {
        let mut problem = AttentionProblem::new(1, 6, 8, 16);
        problem.rules.softcap = Some(softcap);
        says(
            problem.plan(&capabilities()).map(drop),
            "parameter",
            &format!("softcap = {softcap}: must be from 1e-30 to 1e30; leave it unset for none"),
        );
    }
    let alignment = "alignment = none: must be TopLeft or BottomRight, since causal, windows and ALiBi count from a query's own key and there may be more keys than queries, or fewer";
    refused(
        |p| {
            p.rules.causal = true;
            p.kv_len = 9;
        },
        "parameter",
        alignment,
    );
    refused(
        |p| {
            p.rules.alibi = true;
            p.rules.kv_lens = true;
        },
        "parameter",
        alignment,
    );
    refused(
        |p| {
            p.rules.window_left = Some(3);
            p.packed = true;
        },
        "parameter",
        alignment,
    );
    refused(
        |p| p.keys = Some(3..9),
        "parameter",
        "keys = 3..9: must lie within 0..8 (kv_len)",
    );
    refused(
        |p| p.q_type = ElementType::Bool,
        "parameter",
        "q_type = bool: must be f32, f16 or bf16",
    );
    refused(
        |p| p.out_type = ElementType::U32,
        "parameter",
        "out_type = u32: must be f32, f16 or bf16",
    );
    // Without a need for it, nothing must be said.
    let mut problem = AttentionProblem::new(1, 6, 8, 16);
    problem.rules.causal = true;
    problem.plan(&capabilities()).unwrap();
}

/// The arguments, one of them changed.
fn with<'a>(
    mut arguments: AttentionArguments<'a>,
    change: impl FnOnce(&mut AttentionArguments<'a>),
) -> AttentionArguments<'a> {
    change(&mut arguments);
    arguments
}

/// The tensors of rules, each missing, superfluous, of a wrong shape or type.
#[test]
fn tensors_of_rules_are_held_against_the_problem() {
    let Some(gpu) = gpu() else { return };
    let tensor =
        |shape: &[usize], element_type| Tensor::empty(&gpu, shape, element_type).unwrap().view();
    let (f32, u32) = (ElementType::F32, ElementType::U32);
    let problem = AttentionProblem {
        kv_len: 5,
        rules: AttentionRules {
            bias: true,
            kv_lens: true,
            q_lens: true,
            alibi: true,
            sinks: true,
            ..AttentionRules::causal(Alignment::BottomRight)
        },
        ..AttentionProblem::new(2, 4, 3, 8)
    };
    let attention = Attention::new(&gpu, problem).unwrap();
    let (q, k) = (tensor(&[2, 3, 4, 8], f32), tensor(&[2, 5, 4, 8], f32));
    let out = tensor(&[2, 3, 4, 8], f32);
    let (bias, lens) = (tensor(&[3, 5], f32), tensor(&[2], u32));
    let (slopes, sinks) = (tensor(&[4], f32), tensor(&[4], f32));
    let lse = tensor(&[2, 4, 3], f32);
    let good = AttentionArguments {
        lse: Some(&lse),
        rules: RuleArguments {
            bias: Some(&bias),
            kv_lens: Some(&lens),
            q_lens: Some(&lens),
            slopes: Some(&slopes),
            sinks: Some(&sinks),
            ..Default::default()
        },
        ..AttentionArguments::new(&q, &k, &k, &out)
    };
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    attention.encode(&mut encoder, good).unwrap();
    let mut refused = |arguments: AttentionArguments, kind: &str, text: &str| {
        says(attention.encode(&mut encoder, arguments), kind, text);
    };
    let missing = "expected a tensor as the problem's rules say, got none";
    let superfluous = "expected none as the problem's rules say, got a tensor";
    refused(
        with(good, |a| a.rules.bias = None),
        "shape",
        &format!("bias: {missing}"),
    );
    refused(
        with(good, |a| a.rules.kv_lens = None),
        "shape",
        &format!("kv_lens: {missing}"),
    );
    refused(
        with(good, |a| a.rules.q_lens = None),
        "shape",
        &format!("q_lens: {missing}"),
    );
    refused(
        with(good, |a| a.rules.slopes = None),
        "shape",
        &format!("slopes: {missing}"),
    );
    refused(
        with(good, |a| a.rules.sinks = None),
        "shape",
        &format!("sinks: {missing}"),
    );
    let (mask, data) = (tensor(&[5], ElementType::Bool), tensor(&[5], f32));
    refused(
        with(good, |a| a.rules.mask = Some(&mask)),
        "shape",
        &format!("mask: {superfluous}"),
    );
    refused(
        with(good, |a| a.rules.rule_data = Some(&data)),
        "shape",
        &format!("rule_data: {superfluous}"),
    );
    refused(
        with(good, |a| a.rules.cu_seqlens_q = Some(&lens)),
        "shape",
        "cu_seqlens_q: expected none, since the problem is not packed, got a tensor",
    );
    let three = tensor(&[3], u32);
    refused(
        with(good, |a| a.rules.kv_lens = Some(&three)),
        "shape",
        "kv_lens: expected (2), got (3)",
    );
    let floats = tensor(&[2], f32);
    refused(
        with(good, |a| a.rules.q_lens = Some(&floats)),
        "type",
        "q_lens: expected element type u32, got f32",
    );
    let wide = tensor(&[1, 4], f32);
    refused(
        with(good, |a| a.rules.slopes = Some(&wide)),
        "shape",
        "slopes: expected (2, 4), got (1, 4)",
    );
    let five = tensor(&[5], f32);
    refused(
        with(good, |a| a.rules.sinks = Some(&five)),
        "shape",
        "sinks: expected (4), got (5)",
    );
    let apart = tensor(&[4, 2], f32)
        .slice(1, 0..1)
        .unwrap()
        .merge_axes(0..2)
        .unwrap();
    refused(
        with(good, |a| a.rules.sinks = Some(&apart)),
        "layout",
        "sinks: it is not contiguous (shape (4), strides (2)); copy it to a tensor of its own",
    );
    refused(
        with(good, |a| a.rules.bias = Some(&lens)),
        "type",
        "bias: expected element type f32, got u32",
    );
    let odd = tensor(&[4, 5], f32);
    refused(
        with(good, |a| a.rules.bias = Some(&odd)),
        "shape",
        "bias: expected a shape that broadcasts to (2, 4, 3, 5) (each axis full or 1, aligned at the last), got (4, 5)",
    );
    let flat = tensor(&[2, 3, 4], f32);
    refused(
        with(good, |a| a.lse = Some(&flat)),
        "shape",
        "lse: expected (2, 4, 3), got (2, 3, 4)",
    );
    let half = tensor(&[2, 3, 4, 8], ElementType::F16);
    refused(
        with(good, |a| a.q = &half),
        "type",
        "q: expected element type f32, got f16",
    );
    // The log-sum-exp beside the output, or in one of the operands.
    let whole = tensor(&[400], f32);
    let (own_out, own_lse) = (
        whole
            .slice(0, 0..192)
            .unwrap()
            .split_axis(0, &[2, 3, 4, 8])
            .unwrap(),
        whole
            .slice(0, 200..224)
            .unwrap()
            .split_axis(0, &[2, 4, 3])
            .unwrap(),
    );
    let arguments = AttentionArguments {
        out: &own_out,
        lse: Some(&own_lse),
        ..good
    };
    says(
        attention.encode(&mut encoder, arguments),
        "layout",
        "lse: it lies in the same buffer as out; a buffer cannot be read and written by one dispatch: give the output a buffer of its own",
    );
    // Small operands in several buffers are gathered by copies, which a buffer must allow.
    let buffer = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 16,
        usage: wgpu::BufferUsages::STORAGE,
        mapped_at_creation: false,
    });
    let own = Tensor::from_buffer(&gpu, buffer, 0, &[4], f32)
        .unwrap()
        .view();
    let mut arguments = good;
    arguments.rules.sinks = Some(&own);
    says(
        attention.encode(&mut encoder, arguments),
        "layout",
        "sinks: its buffer lacks the usage COPY_SRC; small operands in several buffers are gathered by copies: create it with COPY_SRC, or keep them in one buffer",
    );
    // After all of that the same encoder still works.
    attention.encode(&mut encoder, good).unwrap();
    gpu.submit(encoder.finish()).unwrap();
}

#[test]
fn plans_say_what_is_wrong_with_a_problem() {
    let attention = |change: fn(&mut AttentionProblem)| {
        let mut problem = AttentionProblem::new(1, 2, 8, 16);
        change(&mut problem);
        problem.plan(&capabilities()).map(drop)
    };
    says(
        attention(|p| p.heads = 0),
        "parameter",
        "heads = 0: must be at least 1",
    );
    says(
        attention(|p| p.head_dim = 0),
        "parameter",
        "head_dim = 0: must be at least 1",
    );
    for (scale, word) in [
        (f32::NAN, "NaN"),
        (f32::INFINITY, "inf"),
        (f32::NEG_INFINITY, "-inf"),
    ] {
        let problem = AttentionProblem {
            rules: AttentionRules {
                scale: Some(scale),
                ..Default::default()
            },
            ..AttentionProblem::new(1, 2, 8, 16)
        };
        says(
            problem.plan(&capabilities()).map(drop),
            "parameter",
            &format!("scale = {word}: must be finite"),
        );
    }
    says(
        attention(|p| p.value_dim = 257),
        "limit",
        "value_dim needs 257 channels, but the largest head of attention_tiled allows 256; make the problem smaller, or open the device with a higher limit if the adapter has one",
    );
    says(
        attention(|p| p.kv_len = 1 << 31),
        "limit",
        "kv_len needs 2147483648 tokens, but tokens of one axis allows 536870912; make the problem smaller, or open the device with a higher limit if the adapter has one",
    );
    let few = Capabilities {
        max_storage_buffers: 4,
        ..capabilities()
    };
    says(
        AttentionProblem::new(1, 1, 1, 1).plan(&few).map(drop),
        "limit",
        "kernel attention_tiled [VALUE_DIM=32 KV_TYPE=0 ACROSS=8 DOWN=8 KEYS=8 VALUE_KEYS=32 rules/attend_all rules/plain_scores rules/in_order rules/no_rule shared/fours_f32 shared/tiles_f32] needs 6 storage buffers, but max_storage_buffers_per_shader_stage allows 4; \
         make the problem smaller, or open the device with a higher limit if the adapter has one",
    );
    let small = Capabilities {
        max_workgroup_bytes: 1000,
        ..capabilities()
    };
    let tiled = AttentionProblem {
        form: Some(Form::Tiled),
        ..AttentionProblem::new(1, 1, 1, 1)
    };
    let error = tiled.plan(&small).unwrap_err();
    assert!(
        matches!(&error, Error::LimitExceeded { limit, available: 1000, unit: "bytes", .. }
        if limit == "max_compute_workgroup_storage_size"),
        "{error}"
    );
    let linear = LinearProblem {
        batch: 1 << 20,
        tokens: 1 << 20,
        d_in: 1,
        d_out: 1,
        form: None,
        few: None,
    };
    assert_eq!(kind_of(&linear.plan(&capabilities()).unwrap_err()), "limit");
}

#[test]
fn a_layer_says_what_is_wrong_with_its_configuration() {
    let head_dim = |config: LayerConfig| config.head_dim().map(drop);
    says(
        head_dim(LayerConfig::new(0, 4, 2)),
        "parameter",
        "d_in = 0: must be at least 1",
    );
    says(
        head_dim(LayerConfig::new(4, 0, 2)),
        "parameter",
        "d_out = 0: must be at least 1",
    );
    says(
        head_dim(LayerConfig::new(4, 4, 0)),
        "parameter",
        "heads = 0: must be at least 1",
    );
    says(
        head_dim(LayerConfig::new(10, 10, 4)),
        "parameter",
        "d_out = 10: must be a multiple of heads = 4",
    );
    let config = LayerConfig::new(4, 4, 2).rules(AttentionRules {
        scale: Some(f32::NAN),
        ..Default::default()
    });
    says(head_dim(config), "parameter", "scale = NaN: must be finite");
}

#[test]
fn an_adapter_that_is_not_there_is_an_error() {
    let error = Gpu::open_blocking(&GpuOptions::named("no such adapter")).unwrap_err();
    assert_eq!(kind_of(&error), "adapter not found");
    let text = error.to_string();
    assert!(
        text.starts_with("no adapter is named \"no such adapter\""),
        "{text}"
    );
    // What there is instead depends on whether the machine has any adapter at all.
    assert!(text.contains("; there is "), "{text}");
}

#[cfg(feature = "safetensors")]
#[test]
fn files_say_where_and_what() {
    use wgpu_attention::case::Case;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("case.safetensors");
    let error = Case::open(&path).unwrap_err();
    assert!(
        matches!(&error, Error::Io { path: said, .. } if said.ends_with("case.safetensors")),
        "{error}"
    );
    std::fs::write(&path, b"not a safetensors file at all").unwrap();
    let error = Case::open(&path).unwrap_err();
    assert_eq!(kind_of(&error), "format");
    assert!(error.to_string().contains("case.safetensors"), "{error}");
}

// ---- on the adapter ----

#[test]
fn calls_say_which_argument_is_wrong() {
    let Some(gpu) = gpu() else { return };
    let weight = vec![0.1; 3 * 8 * 4];
    let output = vec![0.1; 64];
    let config = LayerConfig::new(4, 8, 2);
    let new = |config: LayerConfig, qkv: QkvWeights, output: Option<Projection>| {
        MultiHeadAttention::new(&gpu, config.clone(), &LayerWeights { qkv, output })
    };
    let fused = QkvWeights::Fused(Projection::new(&weight));
    says(
        new(LayerConfig::new(4, 512, 1), fused, None).map(drop),
        "limit",
        "value_dim needs 512 channels, but the largest head of attention_tiled allows 256; make the problem smaller, or open the device with a higher limit if the adapter has one",
    );
    says(
        new(
            config.clone(),
            QkvWeights::Fused(Projection::new(&weight[1..])),
            None,
        )
        .map(drop),
        "shape",
        "qkv weight: expected (24, 4) = 96 values, got 95 values",
    );
    says(
        new(
            config.clone(),
            QkvWeights::Fused(Projection::conv1d(&weight).with_bias(&weight[..3])),
            None,
        )
        .map(drop),
        "shape",
        "qkv bias: expected 24 values, got 3 values",
    );
    says(
        new(config.clone(), fused, Some(Projection::new(&weight))).map(drop),
        "shape",
        "output weight: expected (8, 8) = 64 values, got 96 values",
    );
    says(
        new(config.clone(), QkvWeights::Heads(&[]), None).map(drop),
        "shape",
        "heads of the weights: expected 2 (heads of the layer), got 0",
    );

    let layer = new(config.clone(), fused, Some(Projection::new(&output))).unwrap();
    let host = |x: usize, mask: Option<usize>| {
        let mask = mask.map(|count| vec![true; count]);
        layer
            .forward_host_blocking(&vec![0.0; x], 2, 3, mask.as_deref())
            .map(drop)
    };
    host(24, None).unwrap();
    host(24, Some(6)).unwrap();
    says(
        host(23, None),
        "shape",
        "x: expected 24 elements for the shape (2, 3, 4), got 23",
    );
    says(
        host(24, Some(5)),
        "shape",
        "key_mask: expected 6 elements for the shape (2, 3), got 5",
    );

    let tensor = |shape: &[usize], ty| Tensor::empty(&gpu, shape, ty).unwrap();
    let f32 = ElementType::F32;
    says(
        layer.forward(&tensor(&[3, 4], f32), None).map(drop),
        "shape",
        "x: expected (B, T, 4), got (3, 4)",
    );
    says(
        layer.forward(&tensor(&[1, 3, 5], f32), None).map(drop),
        "shape",
        "x: expected (B, T, 4), got (1, 3, 5)",
    );
    says(
        layer
            .forward(&tensor(&[1, 3, 4], ElementType::F16), None)
            .map(drop),
        "type",
        "x: expected element type f32, got f16",
    );
    says(
        layer
            .forward(
                &tensor(&[1, 3, 4], f32),
                Some(&tensor(&[1, 4], ElementType::Bool)),
            )
            .map(drop),
        "shape",
        "key_mask: expected (1, 3), got (1, 4)",
    );
    says(
        layer
            .forward(&tensor(&[1, 3, 4], f32), Some(&tensor(&[1, 3], f32)))
            .map(drop),
        "type",
        "key_mask: expected element type bool, got f32",
    );

    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let attention = Attention::new(&gpu, AttentionProblem::new(1, 2, 3, 4)).unwrap();
    let good = tensor(&[1, 3, 2, 4], f32).view();
    let out = tensor(&[1, 3, 2, 4], f32).view();
    let arguments = AttentionArguments::new(&good, &good, &good, &out);
    let wrong = tensor(&[1, 4, 2, 4], f32).view();
    for (name, arguments) in [
        (
            "q",
            AttentionArguments {
                q: &wrong,
                ..arguments
            },
        ),
        (
            "k",
            AttentionArguments {
                k: &wrong,
                ..arguments
            },
        ),
        (
            "v",
            AttentionArguments {
                v: &wrong,
                ..arguments
            },
        ),
        (
            "out",
            AttentionArguments {
                out: &wrong,
                ..arguments
            },
        ),
    ] {
        let text = format!("{name}: expected (1, 3, 2, 4), got (1, 4, 2, 4)");
        says(attention.encode(&mut encoder, arguments), "shape", &text);
    }
    let mask = tensor(&[1, 3], ElementType::Bool).view();
    says(
        attention.encode(
            &mut encoder,
            AttentionArguments {
                rules: RuleArguments {
                    mask: Some(&mask),
                    ..Default::default()
                },
                ..arguments
            },
        ),
        "shape",
        "mask: expected none as the problem's rules say, got a tensor",
    );
    let strided = tensor(&[1, 3, 4, 2], f32)
        .view()
        .permute(&[0, 1, 3, 2])
        .unwrap();
    let error = attention
        .encode(
            &mut encoder,
            AttentionArguments {
                k: &strided,
                ..arguments
            },
        )
        .unwrap_err();
    assert_eq!(kind_of(&error), "layout");
    let text = error.to_string();
    for part in [
        "k: ",
        "stride of 2",
        "(1, 3, 2, 4)",
        "permute another axis there, or copy",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    // After all of that the same encoder still works.
    attention.encode(&mut encoder, arguments).unwrap();
    gpu.submit(encoder.finish()).unwrap();

    let without_output = new(config.clone(), fused, None).unwrap();
    let plan = without_output.plan(LayerShape::new(1, 3)).unwrap();
    let (x, y) = (
        tensor(&[1, 3, 4], f32).view(),
        tensor(&[1, 3, 8], f32).view(),
    );
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let arguments = LayerArguments::new(&x, &y);
    says(
        without_output.encode_step(&mut encoder, &plan, Step::OutputProjection, arguments, None),
        "parameter",
        "step = output projection: this layer has no output projection",
    );
}

#[test]
fn a_tensor_of_another_gpu_names_both() {
    let (Some(ours), Some(theirs)) = (gpu(), open(&GpuOptions::default())) else {
        return;
    };
    let weight = vec![0.1; 3 * 4];
    let weights = LayerWeights {
        qkv: QkvWeights::Fused(Projection::new(&weight)),
        output: None,
    };
    let layer = MultiHeadAttention::new(&ours, LayerConfig::new(1, 4, 1), &weights).unwrap();
    let x = Tensor::empty(&theirs, &[1, 2, 1], ElementType::F32).unwrap();
    let name = &ours.adapter_info().name;
    says(
        layer.forward(&x, None).map(drop),
        "other device",
        &format!(
            "x: this tensor was made on another Gpu (adapter {name:?}) than the operation (adapter {name:?}); \
             upload it there first"
        ),
    );
}

#[test]
fn memory_that_is_not_there_is_named_in_bytes() {
    let Some(gpu) = gpu() else { return };
    let available = gpu.capabilities().max_buffer_bytes;
    says(
        Tensor::empty(&gpu, &[1 << 20, 1 << 18], ElementType::F32).map(drop),
        "limit",
        &format!(
            "tensor needs {} bytes, but max_buffer_size allows {available}; make the problem smaller, or open the device with a higher limit if the adapter has one",
            1u64 << 40
        ),
    );
    let shape = [usize::MAX, 2];
    says(
        Tensor::empty(&gpu, &shape, ElementType::Bool).map(drop),
        "shape",
        &format!(
            "shape: expected at most 2^60 elements, got ({}, 2)",
            usize::MAX
        ),
    );
}

#[test]
fn a_configuration_for_other_subgroups_is_refused() {
    let Some(gpu) = gpu() else { return };
    let known = gpu.capabilities().known_subgroup();
    let problem = AttentionProblem {
        form: Some(Form::Lanes),
        ..AttentionProblem::new(1, 1, 9, 8)
    };
    let mut plan = problem.plan(gpu.capabilities()).unwrap();
    let mut all = (plan.kernel.configurations)().into_iter();
    let others = |c: &Configuration| c.subgroup_size().is_some_and(|size| known != Some(size));
    plan.configuration = all.find(others).unwrap();
    let error = Attention::from_plan(&gpu, problem, plan).err().unwrap();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    assert!(error.to_string().contains("subgroups of"), "{error}");
}

/// wgpu#3764: a kernel of the caller's own that is no WGSL.
#[test]
fn a_shader_that_is_refused_is_an_error_with_its_line() {
    let Some(gpu) = gpu() else { return };
    let problem = LinearProblem {
        batch: 1,
        tokens: 1,
        d_in: 1,
        d_out: 1,
        form: None,
        few: Some(true),
    };
    let good = problem.plan(gpu.capabilities()).unwrap();
    let with = |source: &'static str| {
        let kernel: &'static Kernel = Box::leak(Box::new(Kernel {
            source,
            ..good.kernel.clone()
        }));
        Linear::from_plan(
            &gpu,
            problem,
            Plan {
                kernel,
                ..good.clone()
            },
        )
        .err()
        .unwrap()
    };
    // Without what the real file declares, the fragments that use it would be refused first.
    let declared = |source: &str| -> &'static str {
        format!(
            "{source}\n@group(0) @binding(1)\nvar<storage, read> weight: array<f32>;\n@group(0) @binding(2)\nvar<storage, read> bias: array<f32>;\n@group(0) @binding(3)\nvar<storage, read_write> y: array<f32>;\n@group(0) @binding(4)\nvar<uniform> params: LinearParams;\n"
        )
        .leak()
    };
    for (source, words) in [
        ("fn broken( {", "broken"),
        (
            "@compute @workgroup_size(1)\nfn another_name() {}",
            good.kernel.name,
        ),
        ("// @unroll\nwhile (true) {\n}\n", "after `// @unroll`"),
        (
            "@group(0) @binding(9)\nvar<storage> far: array<u32>;\n@compute @workgroup_size(1)\nfn linear_few() { _ = far[0]; }",
            "inding",
        ),
    ] {
        let error = with(declared(source));
        let Error::Shader { kernel, message } = &error else {
            panic!("{source}: {error:?}")
        };
        assert_eq!(kernel, good.kernel.name);
        assert!(message.contains(words), "{source}: {message}");
    }
    assert!(
        with(declared("fn broken( {")).to_string().contains("wgsl:"),
        "the line is named"
    );
    // The device is as good as before.
    let linear = Linear::new(&gpu, problem).unwrap();
    let one = Tensor::from_slice(&gpu, &[1, 1, 1], &[2.0f32]).unwrap();
    let y = linear
        .forward(&one, &one.reshape(&[1, 1]).unwrap(), None)
        .unwrap();
    assert_eq!(y.read_blocking::<f32>().unwrap(), [4.0]);
}

// ---- nonsense ----

const SIZES: [usize; 30] = [
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    16,
    31,
    64,
    255,
    256,
    257,
    1000,
    65_535,
    65_536,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    (1 << 32) + 1,
    1 << 53,
    usize::MAX / 3,
    usize::MAX / 3 + 1,
    usize::MAX / 2,
    usize::MAX / 2 + 1,
    usize::MAX / 4 + 1,
    usize::MAX - 1,
    usize::MAX,
];

const TYPES: [ElementType; 5] = [
    ElementType::F32,
    ElementType::F32,
    ElementType::F16,
    ElementType::BF16,
    ElementType::Bool,
];

const SCALES: [Option<f32>; 9] = [
    None,
    Some(0.0),
    Some(-1.0),
    Some(f32::NAN),
    Some(f32::INFINITY),
    Some(f32::NEG_INFINITY),
    Some(f32::MAX),
    Some(f32::MIN_POSITIVE),
    Some(1e-45),
];

struct Nonsense(Random);

impl Nonsense {
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.0.below(from.len())]
    }

    /// Mostly small, so that not all is refused for the same reason.
    fn size(&mut self) -> usize {
        let end = if self.0.below(3) > 0 { 12 } else { SIZES.len() };
        self.pick(&SIZES[..end])
    }

    fn shape(&mut self) -> Vec<usize> {
        (0..self.0.below(5)).map(|_| self.size()).collect()
    }

    fn form(&mut self) -> Option<Form> {
        self.pick(&[None, Some(Form::Tiled), Some(Form::Lanes)])
    }

    fn config(&mut self) -> LayerConfig {
        LayerConfig {
            kv_heads: self.size(),
            head_dim: self.pick(&[None, None, Some(0), Some(1), Some(2), Some(usize::MAX)]),
            value_dim: self.pick(&[None, None, Some(0), Some(3), Some(usize::MAX)]),
            rules: AttentionRules {
                causal: self.0.below(2) == 1,
                scale: self.pick(&SCALES),
                ..Default::default()
            },
            form: self.form(),
            ..LayerConfig::new(self.size(), self.size(), self.size())
        }
    }
}

/// Whether a shape can be made on any device here without filling its memory, or is refused on every one.
fn is_harmless(shape: &[usize]) -> bool {
    let elements = shape
        .iter()
        .fold(1u128, |product, size| product.saturating_mul(*size as u128));
    !(1 << 20..=1 << 40).contains(&elements)
}

/// Does it, counting results; a panic fails with what was tried.
fn tried<T>(
    counts: &mut (usize, usize),
    label: &str,
    call: impl FnOnce() -> Result<T>,
) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => {
            counts.0 += 1;
            Some(value)
        }
        Ok(Err(error)) => {
            assert!(!error.to_string().is_empty());
            counts.1 += 1;
            None
        }
        Err(_) => panic!("{label} panicked"),
    }
}

/// The most memory, in bytes, that this process ever asked the system for.
#[cfg(target_os = "linux")]
fn peak_virtual_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("VmPeak:"))
        .unwrap();
    line.trim()
        .trim_end_matches(" kB")
        .trim()
        .parse::<u64>()
        .unwrap()
        * 1024
}

#[test]
fn nonsense_is_planned_or_refused() {
    let mut nonsense = Nonsense(Random::new(1));
    let mut counts = (0, 0);
    for _ in 0..20_000 {
        let problem = AttentionProblem {
            batch: nonsense.size(),
            heads: nonsense.size(),
            q_len: nonsense.size(),
            kv_len: nonsense.size(),
            kv_heads: nonsense.size(),
            head_dim: nonsense.size(),
            value_dim: nonsense.size(),
            packed: nonsense.pick(&[false, false, true]),
            page_size: nonsense.pick(&[None, None, Some(0), Some(1), Some(16), Some(usize::MAX)]),
            decode: nonsense.pick(&[None, None, Some(false), Some(true)]),
            keys: nonsense
                .pick(&[
                    None,
                    None,
                    Some((0, 1)),
                    Some((2, 1)),
                    Some((3, usize::MAX)),
                ])
                .map(|(start, end)| start..end),
            rules: AttentionRules {
                scale: nonsense.pick(&SCALES),
                softcap: nonsense.pick(&[None, None, Some(30.0), Some(0.0), Some(f32::NAN)]),
                causal: nonsense.pick(&[false, true]),
                alignment: nonsense.pick(&[
                    None,
                    Some(Alignment::TopLeft),
                    Some(Alignment::BottomRight),
                    Some(Alignment::BottomRight),
                ]),
                window_left: nonsense.pick(&[None, None, Some(0), Some(7), Some(usize::MAX)]),
                window_right: nonsense.pick(&[None, None, Some(0), Some(7), Some(usize::MAX)]),
                mask: nonsense.pick(&[false, true]),
                bias: nonsense.pick(&[false, true]),
                kv_lens: nonsense.pick(&[false, true]),
                q_lens: nonsense.pick(&[false, true]),
                alibi: nonsense.pick(&[false, true]),
                sinks: nonsense.pick(&[false, true]),
                rule: None,
            },
            q_type: nonsense.pick(&TYPES),
            kv_type: nonsense.pick(&TYPES),
            out_type: nonsense.pick(&TYPES),
            form: nonsense.form(),
            tier: nonsense.pick(&[
                None,
                None,
                None,
                None,
                Some(Tier::Plain),
                Some(Tier::Half),
                Some(Tier::Matrices),
            ]),
        };
        let capabilities = Capabilities {
            offered_tiers: Tier::FASTER.to_vec(),
            qualified_tiers: match nonsense.pick(&[0, 1, 2]) {
                0 => Vec::new(),
                1 => vec![Tier::Half],
                _ => Tier::FASTER.to_vec(),
            },
            max_groups_per_axis: nonsense.pick(&[65_535, 65_535, 1, 0, u32::MAX]),
            max_workgroup_bytes: nonsense.pick(&[16384, 16384, 0]),
            ..capabilities()
        };
        let label = format!("{problem:?}");
        let plan = tried(&mut counts, &label, || {
            problem.pairs();
            problem.effective_scale()?;
            problem.plan(&capabilities)
        });
        if let Some(plan) = plan {
            assert_eq!(
                plan.grid.is_none(),
                problem.batch == 0 || problem.q_len == 0,
                "{label}"
            );
            assert!(!plan.to_string().is_empty());
        }
        let linear = LinearProblem {
            batch: nonsense.size(),
            tokens: nonsense.size(),
            d_in: nonsense.size(),
            d_out: nonsense.size(),
            form: nonsense.form(),
            few: None,
        };
        tried(&mut counts, &format!("{linear:?}"), || {
            linear.plan(&capabilities)
        });
        let config = nonsense.config();
        tried(&mut counts, &format!("{config:?}"), || config.head_dim());
    }
    assert!(
        counts.0 > 5000 && counts.1 > 5000,
        "{counts:?} successes and errors"
    );
}

#[test]
fn nonsense_on_tensors_and_layers_is_an_error() {
    let Some(gpu) = gpu() else { return };
    let mut nonsense = Nonsense(Random::new(2));
    let mut counts = (0, 0);
    let values = vec![0.5f32; 4096];
    #[cfg(target_os = "linux")]
    let peak = peak_virtual_bytes();
    for _ in 0..1500 {
        let shape = nonsense.shape();
        let label = format!("a tensor of {shape:?}");
        let ty = nonsense.pick(&[
            ElementType::F32,
            ElementType::F16,
            ElementType::BF16,
            ElementType::Bool,
        ]);
        let made = if is_harmless(&shape) {
            tried(&mut counts, &label, || Tensor::empty(&gpu, &shape, ty))
        } else {
            None
        };
        let count = nonsense.size().min(values.len());
        tried(&mut counts, &label, || {
            Tensor::from_slice(&gpu, &shape, &values[..count])
        });
        let Some(tensor) = made else { continue };
        let other = nonsense.shape();
        tried(
            &mut counts,
            &format!("{label} reshaped to {other:?}"),
            || tensor.reshape(&other),
        );
        tried(&mut counts, &label, || tensor.write(&values[..count]));
        let mut view = tensor.view();
        let mut steps = label;
        for _ in 0..4 {
            let (axis, from, to) = (nonsense.0.below(5), nonsense.size(), nonsense.size());
            let next = match nonsense.0.below(3) {
                0 => {
                    steps += &format!(", slice({axis}, {from}..{to})");
                    tried(&mut counts, &steps, || view.slice(axis, from..to))
                }
                1 => {
                    // Half of them with the right product, zeros included.
                    let size = view.shape().get(axis).copied().unwrap_or(1);
                    let sizes = if nonsense.0.below(2) == 0 {
                        vec![from, to]
                    } else {
                        vec![1, size, 1]
                    };
                    let sizes = if size == 0 { vec![from, 0, to] } else { sizes };
                    steps += &format!(", split_axis({axis}, {sizes:?})");
                    tried(&mut counts, &steps, || view.split_axis(axis, &sizes))
                }
                _ => {
                    let mut order: Vec<usize> = (0..view.shape().len()).rev().collect();
                    if nonsense.0.below(3) == 0 {
                        order.push(from);
                    }
                    steps += &format!(", permute({order:?})");
                    tried(&mut counts, &steps, || view.permute(&order))
                }
            };
            view = next.unwrap_or(view);
        }
        let elements = view.elements();
        let read = tried(&mut counts, &steps, || view.read_blocking::<f32>());
        assert!(
            read.is_none_or(|read| read.len() as u64 == elements),
            "{steps}"
        );
        // Whatever it is, an operation takes it or says why not.
        let weight = Tensor::empty(&gpu, &[2, 3], ElementType::F32).unwrap();
        let linear = LinearProblem {
            batch: 1,
            tokens: 2,
            d_in: 3,
            d_out: 2,
            form: Some(Form::Lanes),
            few: None,
        };
        tried(&mut counts, &steps, || {
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            let arguments = LinearArguments {
                x: &view,
                weight: &weight.view(),
                bias: None,
                y: &view,
            };
            Linear::new(&gpu, linear)?.encode(&mut encoder, arguments)
        });
        // An empty output of any shape passes, or is refused.
        if view.shape().len() == 3 {
            let [batch, tokens, d_out] = [0, 1, 2].map(|axis| view.shape()[axis]);
            let linear = LinearProblem {
                batch,
                tokens,
                d_in: 3,
                d_out,
                form: Some(Form::Lanes),
                few: None,
            };
            tried(&mut counts, &steps, || {
                let x = Tensor::empty(&gpu, &[batch, tokens, 3], ElementType::F32)?.view();
                let weight = Tensor::empty(&gpu, &[d_out, 3], ElementType::F32)?.view();
                let mut encoder = gpu.device().create_command_encoder(&Default::default());
                let arguments = LinearArguments {
                    x: &x,
                    weight: &weight,
                    bias: None,
                    y: &view,
                };
                Linear::new(&gpu, linear)?.encode(&mut encoder, arguments)?;
                gpu.submit(encoder.finish())
            });
        }
    }
    for _ in 0..1500 {
        let config = nonsense.config();
        let mut some = || {
            let count = nonsense.size().min(values.len());
            let bias =
                (nonsense.0.below(2) == 0).then(|| &values[..nonsense.size().min(values.len())]);
            let layout = nonsense.pick(&[MatrixLayout::OutIn, MatrixLayout::InOut]);
            Projection {
                weight: &values[..count],
                layout,
                bias,
            }
        };
        let head = HeadProjections {
            q: some(),
            k: some(),
            v: some(),
        };
        let (fused, separate) = (
            QkvWeights::Fused(some()),
            QkvWeights::Separate {
                q: some(),
                k: some(),
                v: some(),
            },
        );
        let list = [head, head];
        for qkv in [
            fused,
            separate,
            QkvWeights::Heads(&list),
            QkvWeights::Heads(&list[..1]),
        ] {
            for output in [None, Some(some())] {
                let label = format!("{config:?}");
                tried(&mut counts, &label, || {
                    MultiHeadAttention::new(&gpu, config.clone(), &LayerWeights { qkv, output })
                });
            }
        }
    }
    let weights = LayerWeights {
        qkv: QkvWeights::Fused(Projection::new(&values[..36])),
        output: None,
    };
    let layer = MultiHeadAttention::new(&gpu, LayerConfig::new(3, 4, 2), &weights).unwrap();
    for _ in 0..1500 {
        let (batch, tokens) = (nonsense.size(), nonsense.size());
        let (x, mask) = (
            nonsense.size().min(values.len()),
            nonsense.size().min(values.len()),
        );
        let mask = (nonsense.0.below(2) == 0).then(|| vec![true; mask]);
        // Half of the time as many values as are called for.
        let wanted = batch.saturating_mul(tokens).saturating_mul(3);
        let x = if wanted <= values.len() && nonsense.0.below(2) == 0 {
            wanted
        } else {
            x
        };
        let label = format!("forward of {batch} x {tokens} with {x} values");
        let y = tried(&mut counts, &label, || {
            layer.forward_host_blocking(&values[..x], batch, tokens, mask.as_deref())
        });
        assert!(y.is_none_or(|y| y.len() == batch * tokens * 4), "{label}");
        if is_harmless(&[batch, tokens, 12]) {
            tried(
                &mut counts,
                &format!("a plan of {batch} x {tokens}"),
                || layer.plan(LayerShape::new(batch, tokens).mask(mask.is_some())),
            );
        }
    }
    #[cfg(target_os = "linux")]
    {
        let grown = peak_virtual_bytes() - peak;
        assert!(grown < 2 << 30, "{grown} bytes of memory were asked for");
    }
    assert!(
        counts.0 > 1000 && counts.1 > 1000,
        "{counts:?} successes and errors"
    );
    let y = layer
        .forward_host_blocking(&values[..6], 1, 2, None)
        .unwrap();
    assert!(
        y.iter().all(|value| value.is_finite()),
        "the layer works as before"
    );
}
