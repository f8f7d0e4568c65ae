//! Opening devices, sharing them between threads, losing them, running out of memory, and timing on them.
//!
//! The tests take turns, so that what one of them measures (memory, times) is its own.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)]

#[path = "support/own_device.rs"]
mod own_device;
mod support;

use own_device::{own_device, own_devices};
use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};
use support::{Random, gpu, open, run};
use wgpu_attention::compare::{Tolerance, compare};
use wgpu_attention::kernels::{
    FOURS_ANY, FOURS_F16_ANY, Form, KERNELS, LINEAR_FOURS_ANY, LINEAR_X_FOURS, MASK, Operation,
    SCORE_RULES,
};
use wgpu_attention::reference::{self, widen};
use wgpu_attention::*;

/// One test at a time.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` on a thread of its own and fails if it takes longer: a hang must not stop the whole suite.
fn within<T: Send + 'static>(
    seconds: u64,
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (sender, receiver) = mpsc::channel();
    let worker = std::thread::spawn(move || sender.send(work()));
    match receiver.recv_timeout(Duration::from_secs(seconds)) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what}: not done in {seconds} s"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match worker.join() {
            Err(panicked) => std::panic::resume_unwind(panicked),
            Ok(_) => unreachable!("the worker sends before it ends"),
        },
    }
}

/// A small layer with its input and what comes out of it.
#[derive(Clone)]
struct Small {
    batch: usize,
    tokens: usize,
    config: LayerConfig,
    x: Vec<f32>,
    qkv: Vec<f32>,
    output: Vec<f32>,
    expected: Vec<f64>,
}

const D_IN: usize = 4;
const D_OUT: usize = 8;

impl Small {
    fn new(seed: u64, batch: usize, tokens: usize) -> Self {
        let mut random = Random::new(seed);
        let config = LayerConfig::new(D_IN, D_OUT, 2).causal(true);
        let (qkv, output) = (
            random.normals(3 * D_OUT * D_IN),
            random.normals(D_OUT * D_OUT),
        );
        let x = random.normals(batch * tokens * D_IN);
        let expected = reference::layer_without_weights(&reference::LayerInputs {
            batch,
            tokens,
            d_in: D_IN,
            d_out: D_OUT,
            heads: config.heads,
            x: &widen(&x),
            qkv_weight: &widen(&qkv),
            output_weight: Some(&widen(&output)),
            rules: reference::Rules {
                causal: true,
                ..Default::default()
            },
            ..Default::default()
        });
        Small {
            batch,
            tokens,
            config,
            x,
            qkv,
            output,
            expected: expected.unwrap().y,
        }
    }

    fn layer(&self, gpu: &Gpu) -> Result<MultiHeadAttention> {
        let weights = LayerWeights {
            qkv: QkvWeights::Fused(Projection::new(&self.qkv)),
            output: Some(Projection::new(&self.output)),
        };
        MultiHeadAttention::new(gpu, self.config.clone(), &weights)
    }

    fn forward(&self, layer: &MultiHeadAttention) -> Result<Vec<f32>> {
        layer.forward_host_blocking(&self.x, self.batch, self.tokens, None)
    }

    fn expect(&self, label: &str, got: &[f32]) {
        let shape = [self.batch, self.tokens, D_OUT];
        // Weights of size 1 make outputs of size 10: the absolute part would be the smaller one.
        let comparison = compare(
            got,
            &shape,
            &self.expected,
            &shape,
            Tolerance::new(1e-4, 1e-4),
        );
        assert!(comparison.passed(), "{label}: {comparison}");
    }

    /// Makes the layer, runs it and checks the result.
    fn check(&self, gpu: &Gpu, label: &str) {
        let layer = self
            .layer(gpu)
            .unwrap_or_else(|error| panic!("{label}: {error}"));
        let y = self
            .forward(&layer)
            .unwrap_or_else(|error| panic!("{label}: {error}"));
        self.expect(label, &y);
    }
}

// ---- opening ----

#[test]
fn a_part_of_the_name_in_any_case_opens_the_adapter() {
    let _turn = turn();
    let Some(under_test) = gpu() else { return };
    let info = under_test.adapter_info();
    let part = info.name.split(' ').next().unwrap().to_uppercase();
    let options = GpuOptions {
        backends: Some(info.backend.into()),
        ..GpuOptions::named(part)
    };
    let gpu = open(&options).unwrap();
    assert_eq!(
        (&gpu.adapter_info().name, gpu.adapter_info().backend),
        (&info.name, info.backend)
    );
    assert!(!gpu.same_as(&under_test) && gpu.same_as(&gpu.clone()));
    let listed = adapters_blocking(&options).unwrap();
    assert!(
        listed.iter().any(|report| report.info.name == info.name),
        "{listed:?}"
    );
}

#[test]
fn a_name_that_matches_nothing_is_an_error_that_lists_what_there_is() {
    let _turn = turn();
    let Some(under_test) = gpu() else { return };
    let error = Gpu::open_blocking(&GpuOptions::named("no such adapter 4711")).unwrap_err();
    let Error::AdapterNotFound { wanted, available } = &error else {
        panic!("{error:?}")
    };
    assert!(wanted.contains("\"no such adapter 4711\""), "{wanted}");
    let name = &under_test.adapter_info().name;
    assert!(available.contains(name), "{available}");
}

/// wgpu#368. Environments without drivers are those of this same test, run again in a process of its own.
#[test]
fn a_machine_without_adapters_is_an_error() {
    const ROLE: &str = "WGPU_ATTENTION_TEST_EXPECTS";
    if let Ok(expected) = std::env::var(ROLE) {
        let error = Gpu::open_blocking(&GpuOptions::default()).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::AdapterNotFound { .. }), "{text}");
        assert!(text.contains(&expected), "{text}");
        match adapters_blocking(&GpuOptions::default()) {
            Ok(found) => assert!(found.is_empty(), "{found:?}"),
            Err(error) => assert!(matches!(error, Error::AdapterNotFound { .. }), "{error}"),
        }
        return;
    }
    let mut cases = vec![("nonsense", "WGPU_BACKEND=\"nonsense\"")];
    // Elsewhere a Vulkan driver is found without a variable that could hide it.
    if cfg!(target_os = "linux") {
        cases.push(("vulkan", "mesa-vulkan-drivers"));
    }
    for (backend, words) in cases {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_machine_without_adapters_is_an_error"])
            .env("VK_DRIVER_FILES", "/none")
            .env("VK_ICD_FILENAMES", "/none")
            .env("__EGL_VENDOR_LIBRARY_FILENAMES", "/none")
            .env("WGPU_BACKEND", backend)
            .env_remove("WGPU_ADAPTER_NAME")
            .env(ROLE, words)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(
            child.status.success() && said.contains("1 passed"),
            "{backend}: {said}"
        );
    }
}

#[test]
fn webgpu_default_limits_run_a_layer() {
    let _turn = turn();
    let options = GpuOptions {
        limits: LimitProfile::WebGpuDefaults,
        ..Default::default()
    };
    let Some(gpu) = open(&options) else { return };
    let limits = wgpu::Limits::default();
    let capabilities = gpu.capabilities();
    assert!(capabilities.max_binding_bytes <= limits.max_storage_buffer_binding_size);
    assert!(capabilities.max_buffer_bytes <= limits.max_buffer_size);
    assert!(
        capabilities.max_workgroup_bytes <= u64::from(limits.max_compute_workgroup_storage_size)
    );
    assert!(capabilities.max_invocations <= limits.max_compute_invocations_per_workgroup);
    let small = Small::new(1, 2, 9);
    for form in [None, Some(Form::Lanes), Some(Form::Tiled)] {
        let config = LayerConfig {
            form,
            ..small.config.clone()
        };
        Small {
            config,
            ..small.clone()
        }
        .check(&gpu, &format!("{form:?}"));
    }
}

/// llama.cpp#26566, mlc-llm#838: what a kernel declares fits the limits that every WebGPU device has.
#[test]
fn every_kernel_builds_under_webgpu_default_limits() {
    let _turn = turn();
    let options = GpuOptions {
        limits: LimitProfile::WebGpuDefaults,
        ..Default::default()
    };
    let Some(gpu) = open(&options) else { return };
    let mut built = 0;
    for kernel in KERNELS {
        if !gpu.capabilities().offers(kernel.least_tier()) {
            assert!(
                gpu.capabilities().can_run(kernel).is_err(),
                "{}",
                kernel.name
            );
            continue;
        }
        gpu.capabilities().can_run(kernel).unwrap();
        for configuration in (kernel.configurations)() {
            let offered = gpu.capabilities().offers(kernel.tier(&configuration));
            if !offered || !gpu.capabilities().suits(&configuration) {
                continue;
            }
            // What is declared does not depend on rules and types, and a large head compiles for seconds: those come
            // with one rule and type only, and in the lanes form, which declares no more for them, not at all.
            let size = configuration
                .get("HEAD_DIM")
                .max(configuration.get("VALUE_DIM"));
            let other = configuration.rules.contains(&MASK) || configuration.get("KV_TYPE") > 0;
            let large = size * configuration.get("ROWS") > 64;
            // More rows declare more workgroup memory, which tests/shaders.rs counts.
            let rows =
                kernel.operation == Operation::Decode && size > 16 && configuration.get("ROWS") > 1;
            // Other ways to read the same operands.
            let again = [
                &FOURS_ANY,
                &FOURS_F16_ANY,
                &LINEAR_X_FOURS,
                &LINEAR_FOURS_ANY,
            ]
            .iter()
            .any(|fragment| configuration.rules.contains(fragment));
            let least = match kernel.name {
                "attention_lanes" => 8,
                "attention_tiled" => 32,
                _ => 16,
            };
            if size > least && other || kernel.form == Form::Lanes && large || rows || again {
                continue;
            }
            let plan = |plan: Result<Plan>| Plan {
                kernel,
                configuration: configuration.clone(),
                ..plan.unwrap()
            };
            let result = match kernel.operation {
                Operation::Linear | Operation::LinearFew => {
                    let problem = LinearProblem {
                        batch: 1,
                        tokens: 1,
                        d_in: 1,
                        d_out: 1,
                        form: None,
                        few: None,
                    };
                    Linear::from_plan(&gpu, problem, plan(problem.plan(gpu.capabilities())))
                        .map(drop)
                }
                Operation::Attention | Operation::Decode => {
                    let problem = AttentionProblem {
                        decode: Some(kernel.operation == Operation::Decode),
                        ..AttentionProblem::new(1, 1, 1, size as usize)
                    };
                    // Faster tiers are for operands of f16 alone.
                    let problem = match kernel.tier(&configuration) {
                        Tier::Plain => problem,
                        _ => problem.stored_as(ElementType::F16),
                    };
                    let plan = plan(problem.plan(gpu.capabilities()));
                    Attention::from_plan(&gpu, problem, plan).map(drop)
                }
                Operation::Weights => {
                    let mut problem = AttentionProblem::new(1, 1, 1, 8);
                    problem.rules.mask = configuration.rules.contains(&MASK);
                    problem.rules.bias = configuration.rules.contains(&SCORE_RULES);
                    AttentionWeights::new(&gpu, problem, WeightsStage::Weights).map(drop)
                }
                Operation::Merge => {
                    let problem = MergeProblem {
                        parts: 1,
                        batch: 1,
                        heads: 1,
                        q_len: 1,
                        value_dim: 1,
                        out_type: ElementType::F32,
                    };
                    Merge::new(&gpu, problem).map(drop)
                }
                Operation::Copy => TensorCopy::new(&gpu).map(drop),
                Operation::Append => Rotary::new(&gpu, RotaryConfig::new(2, 1)).map(drop),
                Operation::Peak => unreachable!("kernels for peaks are not in the table"),
            };
            result.unwrap_or_else(|error| panic!("{} [{configuration}]: {error}", kernel.name));
            built += 1;
        }
    }
    assert!(built >= 16, "only {built} pipelines");
}

#[test]
fn a_device_that_the_application_opened_is_used_as_it_is() {
    let _turn = turn();
    let Some(under_test) = gpu() else { return };
    let (device, queue) = own_device(&under_test, wgpu::Features::empty());
    let gpu = Gpu::from_device(device.clone(), queue).unwrap();
    assert_eq!(
        gpu.capabilities().max_binding_bytes,
        device.limits().max_storage_buffer_binding_size
    );
    assert!(
        !gpu.capabilities().timestamps,
        "the device was opened without the feature"
    );
    assert!(!gpu.capabilities().int64);
    let problem = LinearProblem {
        batch: 1,
        tokens: 9,
        d_in: 16,
        d_out: 8,
        form: Some(Form::Lanes),
        few: Some(false),
    };
    let mut plan = problem.plan(gpu.capabilities()).unwrap();
    let mut all = (plan.kernel.configurations)().into_iter();
    plan.configuration = all.find(|c| c.takes_int64()).unwrap();
    let error = Linear::from_plan(&gpu, problem, plan).err().unwrap();
    assert!(
        matches!(&error, Error::MissingFeature { feature, .. } if feature == "SHADER_INT64"),
        "{error:?}"
    );
    let small = Small::new(2, 1, 6);
    small.check(&gpu, "own device");
    // Wrapped twice, it is two: tensors of one are refused by the other.
    let again = Gpu::from_device(device, gpu.queue().clone()).unwrap();
    small.check(&again, "wrapped again");
    assert!(!gpu.same_as(&again));
}

#[test]
fn two_gpus_in_one_process_work_side_by_side() {
    let _turn = turn();
    let (Some(a), Some(b)) = (open(&GpuOptions::default()), open(&GpuOptions::default())) else {
        return;
    };
    let (first, second) = (Small::new(3, 1, 5), Small::new(4, 2, 7));
    let (layer_a, layer_b) = (first.layer(&a).unwrap(), second.layer(&b).unwrap());
    for _ in 0..3 {
        first.expect("the first", &first.forward(&layer_a).unwrap());
        second.expect("the second", &second.forward(&layer_b).unwrap());
    }
    drop((layer_a, a));
    second.expect("the second alone", &second.forward(&layer_b).unwrap());
}

// ---- tensors of another Gpu (wgpu#3927) ----

#[test]
fn tensors_of_another_gpu_are_refused() {
    let _turn = turn();
    let (Some(ours), Some(theirs)) = (gpu(), open(&GpuOptions::default())) else {
        return;
    };
    let tensor = |gpu: &Gpu, shape: &[usize], ty| Tensor::empty(gpu, shape, ty).unwrap().view();
    let f32 = ElementType::F32;
    let refused = |label: &str, result: Result<()>| match result {
        Err(Error::OtherDevice { argument, .. }) => assert_eq!(argument, label),
        other => panic!("{label}: {other:?}"),
    };
    let mut encoder = ours.device().create_command_encoder(&Default::default());

    let linear = Linear::new(
        &ours,
        LinearProblem {
            batch: 1,
            tokens: 2,
            d_in: 3,
            d_out: 4,
            form: None,
            few: None,
        },
    )
    .unwrap();
    for (wrong, label) in ["x", "weight", "bias", "y"].into_iter().enumerate() {
        let on = |at: usize, shape: &[usize]| {
            tensor(if at == wrong { &theirs } else { &ours }, shape, f32)
        };
        let arguments = LinearArguments {
            x: &on(0, &[1, 2, 3]),
            weight: &on(1, &[4, 3]),
            bias: Some(&on(2, &[4])),
            y: &on(3, &[1, 2, 4]),
        };
        refused(label, linear.encode(&mut encoder, arguments));
    }

    let problem = AttentionProblem {
        rules: AttentionRules {
            mask: true,
            ..Default::default()
        },
        ..AttentionProblem::new(1, 1, 3, 4)
    };
    let attention = Attention::new(&ours, problem).unwrap();
    for (wrong, label) in ["q", "k", "v", "mask", "out"].into_iter().enumerate() {
        let on = |at: usize| if at == wrong { &theirs } else { &ours };
        let of = |at: usize| tensor(on(at), &[1, 3, 1, 4], f32);
        let [q, k, v, out] = [0, 1, 2, 4].map(of);
        let arguments = AttentionArguments {
            rules: RuleArguments {
                mask: Some(&tensor(on(3), &[1, 1, 1, 3], ElementType::Bool)),
                ..Default::default()
            },
            ..AttentionArguments::new(&q, &k, &v, &out)
        };
        refused(label, attention.encode(&mut encoder, arguments));
    }

    let small = Small::new(5, 1, 3);
    let layer = small.layer(&ours).unwrap();
    let plan = layer.plan(LayerShape::new(1, 3).mask(true)).unwrap();
    for (wrong, label) in ["x", "key_mask", "y"].into_iter().enumerate() {
        let on = |at: usize| if at == wrong { &theirs } else { &ours };
        let (x_view, y_view) = (
            tensor(on(0), &[1, 3, D_IN], f32),
            tensor(on(2), &[1, 3, D_OUT], f32),
        );
        let arguments = LayerArguments {
            key_mask: Some(&tensor(on(1), &[1, 3], ElementType::Bool)),
            ..LayerArguments::new(&x_view, &y_view)
        };
        refused(label, layer.encode(&mut encoder, &plan, arguments));
    }
    let foreign_plan = small
        .layer(&theirs)
        .unwrap()
        .plan(LayerShape::new(1, 3))
        .unwrap();
    let (x_view, y_view) = (
        tensor(&ours, &[1, 3, D_IN], f32),
        tensor(&ours, &[1, 3, D_OUT], f32),
    );
    let arguments = LayerArguments::new(&x_view, &y_view);
    refused("plan", layer.encode(&mut encoder, &foreign_plan, arguments));
    let weight = tensor(&theirs, &[3 * D_OUT, D_IN], f32);
    let qkv = QkvTensors::Fused(ProjectionTensors::new(weight));
    let made = MultiHeadAttention::from_tensors(&ours, small.config.clone(), qkv, None);
    refused("qkv weight", made.map(drop));

    // Nothing that was refused left a trace in the encoder.
    ours.submit(encoder.finish()).unwrap();

    small.check(&ours, "afterwards");
}

/// A buffer of another device of the same instance in this one's clothes: wgpu finds out, and the encoder stays sound.
#[test]
fn a_buffer_of_another_device_is_an_error() {
    let _turn = turn();
    let Some(under_test) = gpu() else { return };
    let mut devices = own_devices(&under_test, wgpu::Features::empty(), 2).into_iter();
    let mut wrap = || {
        devices
            .next()
            .map(|(device, queue)| Gpu::from_device(device, queue).unwrap())
            .unwrap()
    };
    let (ours, theirs) = (wrap(), wrap());
    let f32 = ElementType::F32;
    let tensor = |gpu: &Gpu, shape: &[usize]| Tensor::empty(gpu, shape, f32).unwrap().view();
    let linear = Linear::new(
        &ours,
        LinearProblem {
            batch: 1,
            tokens: 2,
            d_in: 3,
            d_out: 4,
            form: None,
            few: None,
        },
    )
    .unwrap();
    let foreign = tensor(&theirs, &[1, 2, 3]);
    let disguised =
        Tensor::from_buffer(&ours, foreign.buffer().clone(), 0, &[1, 2, 3], f32).unwrap();
    assert!(matches!(
        disguised.write(&[0.0f32; 6]),
        Err(Error::Validation { .. })
    ));
    assert!(matches!(
        disguised.read_blocking::<f32>(),
        Err(Error::Validation { .. })
    ));
    let mut encoder = ours.device().create_command_encoder(&Default::default());
    let arguments = LinearArguments {
        x: &disguised.view(),
        weight: &tensor(&ours, &[4, 3]),
        bias: None,
        y: &tensor(&ours, &[1, 2, 4]),
    };
    let result = linear.encode(&mut encoder, arguments);
    assert!(
        matches!(result, Err(Error::Validation { .. })),
        "{result:?}"
    );
    ours.submit(encoder.finish()).unwrap();
    Small::new(5, 1, 3).check(&ours, "afterwards");
}

// ---- an application's own buffers ----

fn own_buffer(gpu: &Gpu, size: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    let descriptor = wgpu::BufferDescriptor {
        label: Some("own"),
        size,
        usage,
        mapped_at_creation: false,
    };
    gpu.device().create_buffer(&descriptor)
}

const ALL_USAGES: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE
    .union(wgpu::BufferUsages::COPY_SRC)
    .union(wgpu::BufferUsages::COPY_DST);

#[test]
fn an_own_buffer_is_wrapped_or_refused_with_the_reason() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    let before = gpu.allocated_bytes();
    let buffer = own_buffer(&gpu, 64, ALL_USAGES);
    let values: Vec<f32> = (0..16).map(|value| value as f32).collect();
    Tensor::from_buffer(&gpu, buffer.clone(), 0, &[16], ElementType::F32)
        .unwrap()
        .write(&values)
        .unwrap();
    let inside = Tensor::from_buffer(&gpu, buffer.clone(), 12, &[2, 3], ElementType::F32).unwrap();
    assert_eq!(inside.read_blocking::<f32>().unwrap(), values[3..9]);
    assert_eq!(inside.view().offset(), 3);
    inside.write(&[-1.0f32; 6]).unwrap();
    let whole = Tensor::from_buffer(&gpu, buffer.clone(), 0, &[16], ElementType::F32).unwrap();
    let expected: Vec<f32> = (0..16)
        .map(|at| {
            if (3..9).contains(&at) {
                -1.0
            } else {
                at as f32
            }
        })
        .collect();
    assert_eq!(whole.read_blocking::<f32>().unwrap(), expected);
    let last = Tensor::from_buffer(&gpu, buffer.clone(), 60, &[1], ElementType::F32).unwrap();
    assert_eq!(last.read_blocking::<f32>().unwrap(), [15.0]);
    let empty = Tensor::from_buffer(&gpu, buffer.clone(), 64, &[0, 7], ElementType::F32).unwrap();
    assert!(empty.read_blocking::<f32>().unwrap().is_empty());
    assert_eq!(
        gpu.allocated_bytes(),
        before,
        "an application's own buffers are not counted"
    );

    let error = |buffer: &wgpu::Buffer, offset, shape: &[usize], ty| {
        Tensor::from_buffer(&gpu, buffer.clone(), offset, shape, ty)
            .err()
            .unwrap()
    };
    let short = error(&buffer, 4, &[16], ElementType::F32);
    assert_eq!(
        short.to_string(),
        "buffer: expected at least 64 bytes from offset 4, got 64 bytes in all"
    );
    assert!(matches!(short, Error::Shape { .. }));
    for offset in [u64::MAX - 3, 68] {
        assert!(
            matches!(
                error(&buffer, offset, &[1], ElementType::F32),
                Error::Shape { .. }
            ),
            "{offset}"
        );
    }
    for (offset, ty) in [
        (2, ElementType::F32),
        (3, ElementType::F16),
        (1, ElementType::BF16),
    ] {
        let misaligned = error(&buffer, offset, &[1], ty);
        assert!(matches!(misaligned, Error::Layout { .. }), "{misaligned:?}");
        assert!(
            misaligned
                .to_string()
                .contains(&format!("multiple of {} (one {ty})", ty.size())),
            "{misaligned}"
        );
    }
    let odd = own_buffer(&gpu, 30, wgpu::BufferUsages::STORAGE);
    assert!(matches!(
        error(&odd, 0, &[1], ElementType::F32),
        Error::Layout { .. }
    ));
    let no_storage = own_buffer(
        &gpu,
        64,
        wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
    );
    let missing = error(&no_storage, 0, &[16], ElementType::F32);
    assert!(matches!(missing, Error::Layout { .. }), "{missing:?}");
    assert!(
        missing
            .to_string()
            .contains("create it with BufferUsages::STORAGE"),
        "{missing}"
    );

    // Without the usages for copies it computes, but is neither written nor read by this crate.
    let bare = own_buffer(&gpu, 64, wgpu::BufferUsages::STORAGE);
    let bare = Tensor::from_buffer(&gpu, bare, 0, &[16], ElementType::F32).unwrap();
    assert!(matches!(bare.write(&values), Err(Error::Validation { .. })));
    assert!(matches!(
        bare.read_blocking::<f32>(),
        Err(Error::Validation { .. })
    ));
    // What lies beside a mask of 3 bytes in an own buffer cannot be kept by writing whole words.
    let mask = Tensor::from_buffer(&gpu, buffer, 1, &[3], ElementType::Bool).unwrap();
    assert!(matches!(mask.write(&[true; 3]), Err(Error::Layout { .. })));
    Small::new(6, 1, 4).check(&gpu, "afterwards");
}

#[test]
fn a_destroyed_buffer_is_an_error_and_the_next_call_works() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    let small = Small::new(7, 1, 5);
    let layer = small.layer(&gpu).unwrap();
    let plan = layer.plan(LayerShape::new(1, 5)).unwrap();
    let y = Tensor::empty(&gpu, &[1, 5, D_OUT], ElementType::F32).unwrap();
    let size = 4 * 5 * D_IN as u64;
    for destroyed_before_encoding in [true, false] {
        let buffer = own_buffer(&gpu, size, ALL_USAGES);
        let x =
            Tensor::from_buffer(&gpu, buffer.clone(), 0, &[1, 5, D_IN], ElementType::F32).unwrap();
        x.write(&small.x).unwrap();
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        if destroyed_before_encoding {
            buffer.destroy();
        }
        let (x_view, y_view) = (x.view(), y.view());
        let arguments = LayerArguments::new(&x_view, &y_view);
        let result = layer.encode(&mut encoder, &plan, arguments);
        let result = result.and_then(|()| {
            buffer.destroy();
            gpu.submit(encoder.finish()).map(drop)
        });
        assert!(
            matches!(result, Err(Error::Validation { .. })),
            "{result:?}"
        );
        assert!(x.read_blocking::<f32>().is_err());
        small.expect("the next call", &small.forward(&layer).unwrap());
    }
}

#[test]
fn a_destroyed_device_is_an_error_neither_a_panic_nor_a_hang() {
    let _turn = turn();
    let Some(under_test) = gpu() else { return };
    for own in [false, true] {
        let gpu = if own {
            let (device, queue) = own_device(&under_test, wgpu::Features::empty());
            Gpu::from_device(device, queue).unwrap()
        } else {
            open(&GpuOptions::default()).unwrap()
        };
        within(30, "calls on a destroyed device", move || {
            let small = Small::new(8, 1, 4);
            let layer = small.layer(&gpu).unwrap();
            small.expect("before", &small.forward(&layer).unwrap());
            let y = Tensor::empty(&gpu, &[3], ElementType::F32).unwrap();
            gpu.device().destroy();
            let gone = |what: &str, result: Result<()>| match result {
                Err(Error::DeviceLost { .. } | Error::Validation { .. }) => {}
                other => panic!("own {own}, {what}: {other:?}"),
            };
            for round in 0..2 {
                gone("forward", small.forward(&layer).map(drop));
                // On a lost device wgpu makes buffers, pipelines and writes without a word, and the loss of an
                // application's own device is told to the application: there it is submitting and reading that fails.
                match Tensor::empty(&gpu, &[3], ElementType::F32) {
                    Ok(tensor) if own => {
                        gone("empty, then read", tensor.read_blocking::<f32>().map(drop))
                    }
                    result => gone("empty", result.map(drop)),
                }
                gone("read", y.read_blocking::<f32>().map(drop));
                match y.write(&[0.0f32; 3]) {
                    Ok(()) if own => {}
                    result => gone("write", result),
                }
                // A shape that was never planned: a pipeline and its parameters would be new.
                match layer.plan(LayerShape::new(2, 40 + round).mask(true)) {
                    Ok(plan) if own => {
                        let mut encoder = gpu.device().create_command_encoder(&Default::default());
                        let tensor =
                            |shape: &[usize], ty| Tensor::empty(&gpu, shape, ty).map(|t| t.view());
                        let submitted = (|| {
                            let (x_view, y_view) = (
                                tensor(&[2, 40 + round, D_IN], ElementType::F32)?,
                                tensor(&[2, 40 + round, D_OUT], ElementType::F32)?,
                            );
                            let arguments = LayerArguments {
                                key_mask: Some(&tensor(&[2, 40 + round], ElementType::Bool)?),
                                ..LayerArguments::new(&x_view, &y_view)
                            };
                            layer.encode(&mut encoder, &plan, arguments)?;
                            gpu.submit(encoder.finish()).map(drop)
                        })();
                        gone("plan, encode and submit", submitted);
                    }
                    result => gone("plan", result.map(drop)),
                }
            }
        });
    }
}

// ---- limits and memory ----

/// wgpu#6221, wgpu#8994.
#[test]
fn too_much_memory_is_an_error_and_the_next_call_works() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    let before = gpu.allocated_bytes();
    let available = gpu.capabilities().max_buffer_bytes;
    // 280 MiB: more than WebGPU's default of 256 MiB.
    let result = Tensor::empty(&gpu, &[280 << 18], ElementType::F32);
    match &result {
        Ok(tensor) => {
            assert_eq!(gpu.allocated_bytes(), before + (280 << 20));
            drop(tensor.clone());
        }
        Err(Error::LimitExceeded {
            needed,
            available: limit,
            ..
        }) => {
            assert_eq!((*needed, *limit), (280 << 20, available));
            assert!(
                available < 280 << 20,
                "the adapter has more than was asked of it"
            );
        }
        Err(Error::OutOfMemory { bytes, .. }) => assert_eq!(*bytes, 280 << 20),
        Err(other) => panic!("{other}"),
    }
    drop(result);
    assert_eq!(gpu.allocated_bytes(), before);

    let small = Small::new(9, 1, 3);
    for elements in [1usize << 38, 1 << 50, 1 << 61, usize::MAX] {
        let error = Tensor::empty(&gpu, &[elements], ElementType::F32)
            .err()
            .unwrap();
        match error {
            Error::LimitExceeded {
                needed,
                available: limit,
                unit: "bytes",
                ..
            } => {
                assert_eq!((needed, limit), (4 * elements as u64, available));
            }
            Error::Shape { .. } if elements > 1 << 60 => {}
            other => panic!("{elements} elements: {other:?}"),
        }
        small.check(&gpu, "the next small call");
    }
    assert_eq!(gpu.allocated_bytes(), before);
}

/// whisper-burn#2: a binding over 128 MiB, on a device with WebGPU's default limits. huggingface/ratchet#266: an empty result in
/// place of an error. samoylenkodmitry/Cranpose#419: a panic where the encoder should go on to work.
#[test]
fn a_binding_over_the_limit_is_named_before_anything_is_allocated() {
    let _turn = turn();
    let options = GpuOptions {
        limits: LimitProfile::WebGpuDefaults,
        ..Default::default()
    };
    let Some(gpu) = open(&options) else { return };
    let available = gpu.capabilities().max_binding_bytes;
    assert!(available <= 128 << 20);
    let named = |result: Result<()>, bytes: u64| match result {
        Err(Error::LimitExceeded {
            limit,
            needed,
            available: there,
            unit,
            ..
        }) => {
            assert_eq!(limit, "max_storage_buffer_binding_size");
            assert_eq!((needed, there, unit), (bytes, available, "bytes"));
        }
        other => panic!("{other:?}"),
    };
    let small = Small::new(10, 1, 3);
    let layer = small.layer(&gpu).unwrap();
    let before = (gpu.allocated_bytes(), gpu.pipeline_count());
    let tokens = (available / (4 * 3 * D_OUT as u64)) as usize + 1;
    named(
        layer.plan(LayerShape::new(1, tokens)).map(drop),
        (4 * 3 * D_OUT * tokens) as u64,
    );
    named(
        layer.plan(LayerShape::new(tokens, 1).mask(true)).map(drop),
        (4 * 3 * D_OUT * tokens) as u64,
    );
    assert_eq!((gpu.allocated_bytes(), gpu.pipeline_count()), before);

    // K of 524289 keys of 64 channels: 128 MiB and one key.
    let keys = 524_289;
    let attention = Attention::new(
        &gpu,
        AttentionProblem {
            kv_len: keys,
            ..AttentionProblem::new(1, 1, 1, 64)
        },
    );
    let attention = attention.unwrap();
    let q = Tensor::empty(&gpu, &[1, 1, 1, 64], ElementType::F32)
        .unwrap()
        .view();
    let out = Tensor::empty(&gpu, &[1, 1, 1, 64], ElementType::F32)
        .unwrap()
        .view();
    let k = Tensor::empty(&gpu, &[1, keys, 1, 64], ElementType::F32)
        .unwrap()
        .view();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let arguments = AttentionArguments::new(&q, &k, &k, &out);
    named(attention.encode(&mut encoder, arguments), 134_217_984);
    gpu.submit(encoder.finish()).unwrap();
    small.check(&gpu, "afterwards");
}

/// Bytes that this process holds in memory.
#[cfg(target_os = "linux")]
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// wgpu#3806: a caller who submits and never reads.
#[test]
fn memory_stays_flat_over_forwards_that_nobody_reads() {
    let _turn = turn();
    let Some(gpu) = open(&GpuOptions::default()) else {
        return;
    };
    let small = Small::new(11, 2, 16);
    let layer = small.layer(&gpu).unwrap();
    let x = Tensor::from_slice(&gpu, &[2, 16, D_IN], &small.x).unwrap();
    let forward = |times: usize| {
        let mut y = layer.forward(&x, None).unwrap();
        for _ in 1..times {
            y = layer.forward(&x, None).unwrap();
        }
        y
    };
    forward(200);
    let allocated = gpu.allocated_bytes();
    #[cfg(target_os = "linux")]
    let resident = resident_bytes();
    let y = forward(1200);
    #[cfg(target_os = "linux")]
    {
        let grown = resident_bytes().saturating_sub(resident);
        assert!(grown < 20 << 20, "{grown} bytes more after 1200 forwards");
    }
    small.expect("the last one", &y.read_blocking::<f32>().unwrap());
    drop(y);
    assert_eq!(gpu.allocated_bytes(), allocated);
}

/// wgpu#4073.
#[test]
fn pipelines_are_made_once_for_each_configuration() {
    let _turn = turn();
    let Some(gpu) = open(&GpuOptions::default()) else {
        return;
    };
    let smalls: Vec<Small> = [1, 3, 20, 33, 70]
        .map(|tokens| Small::new(12, 1, tokens))
        .into();
    let layer = smalls[0].layer(&gpu).unwrap();
    let mut configurations = BTreeSet::new();
    for small in &smalls {
        for (_, plan) in layer
            .plan(LayerShape::new(1, small.tokens))
            .unwrap()
            .steps()
        {
            configurations.insert(format!("{} {}", plan.kernel.name, plan.configuration));
        }
    }
    assert_eq!(
        gpu.pipeline_count(),
        configurations.len(),
        "{configurations:?}"
    );
    let xs: Vec<Tensor> = smalls
        .iter()
        .map(|s| Tensor::from_slice(&gpu, &[1, s.tokens, D_IN], &s.x).unwrap())
        .collect();
    for call in 0..1000 {
        let y = layer.forward(&xs[call % 5], None).unwrap();
        if call >= 995 {
            smalls[call % 5].expect("a late call", &y.read_blocking::<f32>().unwrap());
        }
    }
    assert_eq!(gpu.pipeline_count(), configurations.len());
    // Another layer of the same sizes brings no new one either.
    smalls[1].check(&gpu, "another layer");
    assert_eq!(gpu.pipeline_count(), configurations.len());
}

/// transformers.js#1739.
#[test]
fn memory_returns_to_where_it_was_when_shapes_come_and_go() {
    let _turn = turn();
    let Some(gpu) = open(&GpuOptions::default()) else {
        return;
    };
    let smalls: Vec<Small> = (1..=20)
        .map(|at| Small::new(at, 1 + at as usize % 3, 3 * at as usize))
        .collect();
    assert_eq!(gpu.allocated_bytes(), 0);
    let layer = Small::new(1, 1, 1).layer(&gpu).unwrap();
    let weights = gpu.allocated_bytes();
    assert_eq!(weights, 4 * (3 * D_OUT * D_IN + D_OUT * D_OUT) as u64);
    let mut after_cycle = Vec::new();
    for _ in 0..4 {
        for small in &smalls {
            layer
                .forward_host_blocking(&small.x, small.batch, small.tokens, None)
                .unwrap();
        }
        after_cycle.push(gpu.allocated_bytes());
    }
    let (batch, tokens) = (smalls[19].batch, smalls[19].tokens);
    let workspace = (4 * batch * tokens * 4 * D_OUT) as u64;
    assert_eq!(
        after_cycle,
        [weights + workspace; 4],
        "the plan of the last shape is kept, no other"
    );
    drop(layer);
    assert_eq!(gpu.allocated_bytes(), 0);
}

// ---- reading back, threads ----

/// The smallest executor that runs futures on several threads.
struct Executor {
    ready: Mutex<VecDeque<Arc<Task>>>,
    changed: Condvar,
}

type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

struct Task {
    job: Mutex<Option<Job>>,
    executor: Arc<Executor>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let executor = self.executor.clone();
        executor.ready.lock().unwrap().push_back(self);
        executor.changed.notify_one();
    }
}

impl Executor {
    fn run(jobs: Vec<Job>, threads: usize) {
        let executor = Arc::new(Executor {
            ready: Default::default(),
            changed: Condvar::new(),
        });
        let left = Mutex::new(jobs.len());
        for job in jobs {
            Arc::new(Task {
                job: Mutex::new(Some(job)),
                executor: executor.clone(),
            })
            .wake();
        }
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while *left.lock().unwrap() > 0 {
                        let task = {
                            let ready = executor.ready.lock().unwrap();
                            let tick = Duration::from_millis(50);
                            let (mut ready, _) = executor
                                .changed
                                .wait_timeout_while(ready, tick, |r| r.is_empty())
                                .unwrap();
                            ready.pop_front()
                        };
                        let Some(task) = task else { continue };
                        let waker = Waker::from(task.clone());
                        let mut job = task.job.lock().unwrap();
                        let Some(running) = job.as_mut() else {
                            continue;
                        };
                        if running
                            .as_mut()
                            .poll(&mut Context::from_waker(&waker))
                            .is_ready()
                        {
                            *job = None;
                            *left.lock().unwrap() -= 1;
                        }
                    }
                });
            }
        });
    }
}

/// wgpu#2266: a read-back completes though nobody but this crate polls the device.
#[test]
fn results_are_read_under_any_executor() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    let small = Small::new(13, 1, 9);
    let layer = small.layer(&gpu).unwrap();
    small.expect("warm", &small.forward(&layer).unwrap());
    let (a, b) = (small.clone(), layer.clone());
    within(10, "under pollster", move || {
        let y = pollster::block_on(b.forward_host(&a.x, a.batch, a.tokens, None)).unwrap();
        a.expect("under pollster", &y);
    });
    for threads in [1, 3] {
        let (small, layer) = (small.clone(), layer.clone());
        within(10, "under an executor of several threads", move || {
            let (sender, results) = mpsc::channel();
            let jobs: Vec<Job> = (0..12)
                .map(|_| {
                    let (small, layer, sender) = (small.clone(), layer.clone(), sender.clone());
                    let job: Job = Box::pin(async move {
                        let y = layer
                            .forward_host(&small.x, small.batch, small.tokens, None)
                            .await;
                        sender.send(y).unwrap();
                    });
                    job
                })
                .collect();
            drop(sender);
            Executor::run(jobs, threads);
            let results: Vec<Result<Vec<f32>>> = results.iter().collect();
            assert_eq!(results.len(), 12);
            for y in results {
                small.expect(&format!("{threads} threads"), &y.unwrap());
            }
        });
    }
    // A future that is dropped unfinished leaves nothing behind that would stop the next.
    let x = Tensor::from_slice(&gpu, &[1, 9, D_IN], &small.x).unwrap();
    let mut read = Box::pin(
        layer
            .forward(&x, None)
            .unwrap()
            .view()
            .slice(1, 0..1)
            .map(|view| async move { view.read::<f32>().await })
            .unwrap(),
    );
    let _ = read.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    drop(read);
    small.expect("after a dropped read", &small.forward(&layer).unwrap());
}

/// burn#2032: who waits for a slow result does not hold up others. A generous bound, not a timing.
#[test]
fn a_slow_read_does_not_hold_up_other_threads() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    let small = Small::new(14, 1, 2);
    let layer = small.layer(&gpu).unwrap();
    small.expect("warm", &small.forward(&layer).unwrap());
    let slow = Small::new(15, 4, 300);
    let slow_layer = slow.layer(&gpu).unwrap();
    slow.expect("warm", &slow.forward(&slow_layer).unwrap());
    within(60, "100 small forwards beside a slow one", move || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let x = Tensor::from_slice(&gpu, &[4, 300, D_IN], &slow.x).unwrap();
                let mut y = slow_layer.forward(&x, None).unwrap();
                for _ in 1..5 {
                    y = slow_layer.forward(&x, None).unwrap();
                }
                slow.expect("slow", &y.read_blocking::<f32>().unwrap());
            });
            for _ in 0..100 {
                small.expect("small", &small.forward(&layer).unwrap());
            }
        });
    });
}

/// wgpu#4686.
#[test]
fn sixteen_threads_share_one_gpu() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    within(120, "16 threads on one Gpu", move || {
        let shared = Small::new(16, 1, 6);
        let shared_layer = shared.layer(&gpu).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..16 {
                let (gpu, shared, shared_layer) = (&gpu, &shared, &shared_layer);
                scope.spawn(move || {
                    // Of every two calls one is on a layer that all threads share.
                    let own = Small::new(100 + thread, 1, 4);
                    let own_layer = own.layer(gpu).unwrap();
                    for call in 0..25 {
                        own.expect(
                            &format!("thread {thread}, call {call}"),
                            &own.forward(&own_layer).unwrap(),
                        );
                        shared.expect("shared", &shared.forward(shared_layer).unwrap());
                    }
                });
            }
        });
    });
}

#[test]
fn sixteen_threads_each_with_a_gpu_of_its_own() {
    let _turn = turn();
    if gpu().is_none() {
        return;
    }
    within(120, "16 threads with a Gpu each", || {
        std::thread::scope(|scope| {
            for thread in 0..16 {
                scope.spawn(move || {
                    let gpu = open(&GpuOptions::default()).unwrap();
                    let small = Small::new(200 + thread, 1, 4);
                    let layer = small.layer(&gpu).unwrap();
                    for call in 0..50 {
                        small.expect(
                            &format!("thread {thread}, call {call}"),
                            &small.forward(&layer).unwrap(),
                        );
                    }
                });
            }
        });
    });
}

/// onnxruntime#31627.
#[test]
fn threads_open_run_and_drop_at_the_same_time() {
    let _turn = turn();
    if gpu().is_none() {
        return;
    }
    within(120, "8 threads that open, run and drop", || {
        for round in 0..3 {
            std::thread::scope(|scope| {
                for thread in 0..8 {
                    scope.spawn(move || {
                        let gpu = open(&GpuOptions::default()).unwrap();
                        Small::new(8 * round + thread, 1, 3)
                            .check(&gpu, &format!("round {round}, thread {thread}"));
                    });
                }
            });
        }
    });
}

// ---- timing ----

/// wgpu#6406, cubecl#1421.
#[test]
fn timestamps_cover_every_pass_and_nothing_else() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    if !gpu.capabilities().timestamps {
        let error = Timestamps::new(&gpu, 4).err().unwrap();
        assert!(
            matches!(&error, Error::MissingFeature { feature, .. } if feature == "TIMESTAMP_QUERY"),
            "{error:?}"
        );
        return;
    }
    let small = Small::new(17, 2, 192);
    let layer = small.layer(&gpu).unwrap();
    let plan = layer.plan(LayerShape::new(2, 192)).unwrap();
    let x = Tensor::from_slice(&gpu, &[2, 192, D_IN], &small.x)
        .unwrap()
        .view();
    let y = Tensor::empty(&gpu, &[2, 192, D_OUT], ElementType::F32)
        .unwrap()
        .view();
    let mut timestamps = Timestamps::new(&gpu, 24).unwrap();
    let mut time = |layers: usize| {
        let started = Instant::now();
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        for _ in 0..layers {
            let arguments = LayerArguments::new(&x, &y);
            layer
                .encode_timed(&mut encoder, &plan, arguments, Some(&mut timestamps))
                .unwrap();
        }
        timestamps.resolve(&mut encoder);
        let submission = gpu.submit(encoder.finish()).unwrap();
        gpu.wait_for(submission).unwrap();
        let wall = started.elapsed().as_secs_f64();
        let spans = timestamps.read_blocking().unwrap();
        assert_eq!(spans.len(), 3 * layers);
        for (span, label) in spans.iter().zip(
            ["QKV projection", "attention", "output projection"]
                .iter()
                .cycle(),
        ) {
            assert_eq!(span.label, *label);
            assert!(
                span.seconds > 0.0 && span.seconds <= wall,
                "{span:?} of {wall} s"
            );
        }
        let total: f64 = spans.iter().map(|span| span.seconds).sum();
        assert!(total <= wall, "{total} s on the GPU within {wall} s");
        total
    };
    // Every pass of every layer is covered (cubecl#1421), not the first one alone.
    for layers in [1, 2, 4, 8] {
        assert!(time(layers) > 0.0);
    }
    small.expect("timed", &y.read_blocking::<f32>().unwrap());

    // More passes than there is room for are refused before anything is recorded.
    let mut few = Timestamps::new(&gpu, 2).unwrap();
    run(&gpu, |encoder| {
        let arguments = LayerArguments::new(&x, &y);
        let refused = layer.encode_timed(encoder, &plan, arguments, Some(&mut few));
        assert!(
            matches!(
                refused,
                Err(Error::LimitExceeded {
                    needed: 3,
                    available: 2,
                    ..
                })
            ),
            "{refused:?}"
        );
        few.resolve(encoder);
    });
    assert_eq!(few.read_blocking().unwrap(), []);

    // Nothing is dispatched for an empty batch: nothing is timed either, and nothing goes wrong.
    let plan = layer.plan(LayerShape::new(0, 4)).unwrap();
    let empty = |channels| {
        Tensor::empty(&gpu, &[0, 4, channels], ElementType::F32)
            .unwrap()
            .view()
    };
    let mut none = Timestamps::new(&gpu, 3).unwrap();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let (x_view, y_view) = (empty(D_IN), empty(D_OUT));
    let arguments = LayerArguments::new(&x_view, &y_view);
    layer
        .encode_timed(&mut encoder, &plan, arguments, Some(&mut none))
        .unwrap();
    none.resolve(&mut encoder);
    gpu.submit(encoder.finish()).unwrap();
    assert_eq!(none.read_blocking().unwrap(), []);
    assert!(none.read_blocking().unwrap().is_empty());
}

#[test]
fn timestamps_have_their_limits() {
    let _turn = turn();
    let Some(under_test) = gpu() else { return };
    let (device, queue) = own_device(&under_test, wgpu::Features::empty());
    let without = Gpu::from_device(device, queue).unwrap();
    let error = Timestamps::new(&without, 4).err().unwrap();
    let text = error.to_string();
    assert!(matches!(error, Error::MissingFeature { .. }), "{text}");
    assert!(
        text.contains("TIMESTAMP_QUERY") && text.contains(&under_test.adapter_info().name),
        "{text}"
    );
    if under_test.capabilities().timestamps {
        for passes in [0, 2049, u32::MAX] {
            let error = Timestamps::new(&under_test, passes).err().unwrap();
            assert!(
                matches!(
                    error,
                    Error::Parameter {
                        parameter: "passes",
                        ..
                    }
                ),
                "{error}"
            );
        }
        assert!(Timestamps::new(&under_test, 2048).is_ok());
        let (device, queue) = own_device(&under_test, wgpu::Features::TIMESTAMP_QUERY);
        let with = Gpu::from_device(device, queue).unwrap();
        assert!(with.capabilities().timestamps && Timestamps::new(&with, 1).is_ok());
    }
}
