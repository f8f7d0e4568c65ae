//! Every assembled source of every configuration, checked without a GPU: naga accepts it, what naga reads in it
//! is what the descriptor says, it fits the WebGPU minimum limits, and it translates to what other vendors' drivers take.

use naga::back;
use naga::valid::ModuleInfo;
use wgpu_attention::bench::PEAK_KERNELS;
use wgpu_attention::kernels::{
    BIAS, Configuration, Fragment, KERNELS, Kernel, NO_RULE, Operation, RULE_DATA, Tier, reflect,
};
use wgpu_attention::wgpu;

/// Those that are planned with, and those that peaks are measured with.
fn kernels() -> impl Iterator<Item = &'static Kernel> {
    KERNELS.iter().chain(PEAK_KERNELS).copied()
}

/// Runs `check` for every configuration of every kernel and reports all that fail.
fn for_each_configuration(check: impl Fn(&Kernel, &Configuration, &str) -> Result<(), String>) {
    let mut failures = Vec::new();
    let mut checked = 0;
    for kernel in kernels() {
        for configuration in configurations(kernel) {
            let result = kernel
                .assemble(&configuration)
                .map_err(|error| error.to_string())
                .and_then(|source| check(kernel, &configuration, &source));
            if let Err(error) = result {
                failures.push(format!("{} [{configuration}]: {error}", kernel.name));
            }
            checked += 1;
        }
    }
    assert!(checked >= 4, "only {checked} configurations");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Those of the table, and for each kernel that takes rules one with a rule of a caller's own.
fn configurations(kernel: &Kernel) -> Vec<Configuration> {
    let mut all = (kernel.configurations)();
    let ruled = all
        .iter()
        .rev()
        .find(|c| c.rules.contains(&NO_RULE))
        .cloned();
    if let Some(mut ruled) = ruled {
        ruled.rules.retain(|rule| *rule != NO_RULE);
        ruled.rules.push(RULE_DATA.clone());
        ruled.rules.push(Fragment {
            name: "rule".into(),
            source: "const RULED: bool = true;
const UNRULED: u32 = 0u;
fn may_attend(batch: u32, head: u32, query: u32, key: u32) -> bool {
    return (query ^ key) % 3u != batch;
}
fn score(score: f32, batch: u32, head: u32, query: u32, key: u32) -> f32 {
    return score + rule_data(head);
}
"
            .into(),
        });
        all.push(ruled);
    }
    all
}

fn expect<T: PartialEq + std::fmt::Debug>(what: &str, got: T, expected: T) -> Result<(), String> {
    if got == expected {
        return Ok(());
    }
    Err(format!("{what}: expected {expected:?}, got {got:?}"))
}

#[test]
fn names_are_unique_and_are_those_of_the_files() {
    let mut names: Vec<_> = kernels().map(|kernel| kernel.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), kernels().count());
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/shaders");
    let mut files: Vec<String> = std::fs::read_dir(folder)
        .expect("shaders/ is there")
        .filter_map(|entry| {
            Some(
                entry
                    .ok()?
                    .file_name()
                    .to_str()?
                    .strip_suffix(".wgsl")?
                    .to_string(),
            )
        })
        .collect();
    files.sort_unstable();
    assert_eq!(
        files, names,
        "every file of shaders/ has a descriptor, and every descriptor a file"
    );
}

#[test]
fn shaders_say_what_their_descriptors_say() {
    for_each_configuration(|kernel, configuration, source| {
        let seen = reflect::reflect(source)?;
        expect(
            "entry points",
            seen.entry_points.clone(),
            vec![kernel.name.to_string()],
        )?;
        if !seen.binds(kernel.bound(configuration)) {
            return Err(format!(
                "bindings: expected {:?}, got {:?}",
                kernel.bindings, seen.bindings
            ));
        }
        let params = seen.params.ok_or("no uniform struct")?;
        expect("params", params.name.as_str(), kernel.params.name)?;
        expect(
            "size of params",
            (params.size as usize).next_multiple_of(16),
            kernel.params.size.next_multiple_of(16),
        )?;
        let fields: Vec<_> = kernel
            .params
            .fields
            .iter()
            .map(|field| {
                (
                    field.name.to_string(),
                    field.offset as u32,
                    field.ty.to_string(),
                )
            })
            .collect();
        expect("fields of params", params.members, fields)
    });
}

#[test]
fn sizes_are_those_of_the_descriptor_and_within_webgpu() {
    let limits = wgpu::Limits::default();
    let mut failures = Vec::new();
    for kernel in kernels() {
        for configuration in (kernel.configurations)() {
            // tinygrad/tinygrad#1461, tracel-ai/cubecl#873: wgpu may need one more for array lengths, so that only
            // mask and bias together take as many as there are, and what moves q, k and v at once.
            let buffers = kernel.storage_buffers(&configuration);
            let all = configuration.rules.contains(&BIAS) || kernel.operation == Operation::Append;
            if buffers > limits.max_storage_buffers_per_shader_stage - u32::from(!all) {
                failures.push(format!(
                    "{} [{configuration}]: {buffers} buffers",
                    kernel.name
                ));
            }
            let source = kernel.assemble(&configuration).expect("assembles");
            let seen = reflect::reflect(&source).expect("valid");
            let invocations: u32 = seen.workgroup_size.iter().product();
            let result = expect(
                "invocations",
                invocations,
                (kernel.invocations)(&configuration),
            )
            .and_then(|()| {
                expect(
                    "workgroup memory",
                    seen.workgroup_bytes,
                    (kernel.workgroup_bytes)(&configuration),
                )
            });
            if let Err(error) = result {
                failures.push(format!("{} [{configuration}]: {error}", kernel.name));
            }
            // Heads of more than 128 channels have another configuration that takes less.
            let larger = kernel.name == "attention_blocks" && configuration.get("HEAD_DIM") > 128;
            let bytes = u64::from(limits.max_compute_workgroup_storage_size);
            if seen.workgroup_bytes > bytes * (1 + u64::from(larger))
                || invocations > limits.max_compute_invocations_per_workgroup
            {
                failures.push(format!(
                    "{} [{configuration}]: over WebGPU's limits: {seen:?}",
                    kernel.name
                ));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Translates a validated module with every writer of naga that has its arithmetic: GLSL ES has neither f16 nor integers of 64 bits, and neither it nor HLSL has matrix
/// units. Where naga learns it, this fails and the list below is to be shortened.
fn translate(
    module: &naga::Module,
    info: &ModuleInfo,
    entry: &str,
    tier: Tier,
) -> Result<(), String> {
    let fail = |language: &str, error: &dyn std::fmt::Display| format!("{language}: {error}");

    let spirv = back::spv::Options {
        lang_version: (1, 3),
        ..Default::default()
    };
    back::spv::write_vec(module, info, &spirv, None).map_err(|error| fail("SPIR-V", &error))?;

    let metal = back::msl::Options {
        lang_version: (2, 4),
        fake_missing_bindings: true,
        ..Default::default()
    };
    back::msl::write_string(module, info, &metal, &Default::default())
        .map_err(|error| fail("MSL", &error))?;

    let matrices = naga::valid::Capabilities::COOPERATIVE_MATRIX;
    if tier == Tier::Matrices {
        let learnt = back::hlsl::supported_capabilities() | back::glsl::supported_capabilities();
        return match learnt.intersects(matrices) {
            true => Err("naga has learnt to translate matrix units: translate them here".into()),
            false => Ok(()),
        };
    }

    let mut hlsl = String::new();
    let options = back::hlsl::Options {
        fake_missing_bindings: true,
        ..Default::default()
    };
    back::hlsl::Writer::new(&mut hlsl, &options, &Default::default())
        .write(module, info, None)
        .map_err(|error| fail("HLSL", &error))?;

    let mut glsl = String::new();
    let options = back::glsl::Options {
        version: back::glsl::Version::Embedded {
            version: 310,
            is_webgl: false,
        },
        ..Default::default()
    };
    let pipeline = back::glsl::PipelineOptions {
        shader_stage: naga::ShaderStage::Compute,
        entry_point: entry.into(),
        multiview: None,
    };
    back::glsl::Writer::new(
        &mut glsl,
        module,
        info,
        &options,
        &pipeline,
        Default::default(),
    )
    .and_then(|mut writer| writer.write())
    .map_err(|error| fail("GLSL ES", &error))?;
    Ok(())
}

/// gfx-rs/wgpu#4436: what one compiler refuses, such as loops that cannot be written out.
#[test]
fn every_vendors_language_takes_every_kernel() {
    for_each_configuration(|kernel, configuration, source| {
        let (module, info) = reflect::validate(source)?;
        let tier = kernel.tier(configuration);
        let translated = translate(&module, &info, kernel.name, tier);
        // It has no numbers of 16 or 64 bits.
        if tier != Tier::Half && !configuration.takes_int64() {
            return translated;
        }
        match translated {
            Err(error) if error.starts_with("GLSL ES: ") => Ok(()),
            Err(error) => Err(error),
            Ok(()) => {
                Err("naga has learnt to translate it to GLSL ES: expect no error of it".into())
            }
        }
    });
}

/// A plain-text lint of what naga does not refuse but drivers get wrong.
#[test]
fn shader_text_keeps_the_rules() {
    let mut failures = Vec::new();
    for kernel in kernels() {
        let mut texts: Vec<Fragment> = (kernel.configurations)()
            .into_iter()
            .flat_map(|c| c.rules)
            .collect();
        texts.dedup();
        texts.push(RULE_DATA.clone());
        texts.extend(kernel.fragments.iter().map(|fragment| (*fragment).clone()));
        texts.push(Fragment {
            name: kernel.name.into(),
            source: kernel.source.into(),
        });
        for Fragment { name, source } in &texts {
            let text: &str = source;
            for (number, line) in text.lines().enumerate() {
                if let Some(rule) = broken_rule(line) {
                    failures.push(format!(
                        "{name}.wgsl:{}: {rule}: {}",
                        number + 1,
                        line.trim()
                    ));
                }
            }
            for (number, rule) in misplaced_barriers(text) {
                failures.push(format!("{name}.wgsl:{number}: {rule}"));
            }
        }
    }
    failures.sort();
    failures.dedup();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn broken_rule(line: &str) -> Option<&'static str> {
    let code = line.split("//").next().unwrap_or("").trim();
    // Some compilers keep a loop-local's old value.
    if code.starts_with("var ") && !code.contains('=') {
        return Some("a var is initialised where it is declared");
    }
    // gfx-rs/wgpu#5128: no infinity by a literal or a constant bit pattern.
    let squeezed: String = code.to_lowercase().split_whitespace().collect();
    for infinity in [
        "bitcast<f32>(0x",
        "1.0/0.0",
        "1e39",
        "3.4028235e38",
        "3.402823e38",
    ] {
        if squeezed.contains(infinity) {
            return Some("no stand-in for infinity");
        }
    }
    None
}

/// gfx-rs/wgpu#4566, pytorch/executorch#22326: every barrier stands where all invocations of the workgroup come
/// by: in a loop whose header names nothing of the invocation's own, in no `if`, and after no return but the one
/// that the workgroup's number decides.
fn misplaced_barriers(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut blocks: Vec<String> = Vec::new();
    let mut condition_of_return = None;
    let mut previous_comment = false;
    for (number, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or("").trim();
        if code.contains("return;") {
            condition_of_return = blocks.last().cloned();
        }
        if code.contains("Barrier()") {
            for block in &blocks {
                let own = ["local", "thread", "lane", "row", "channel"];
                if block.starts_with("if")
                    || block.contains("else")
                    || own.iter().any(|word| block.contains(word)) && block.starts_with("for")
                {
                    found.push((number + 1, format!("a barrier inside `{block}`")));
                }
            }
            if condition_of_return
                .as_deref()
                .is_some_and(|c| c != "if (number >= params.groups) {")
            {
                found.push((
                    number + 1,
                    format!("a barrier after a return under {condition_of_return:?}"),
                ));
            }
            if !previous_comment {
                found.push((
                    number + 1,
                    "a barrier without a comment that says why".into(),
                ));
            }
        }
        previous_comment = line.trim().starts_with("//");
        for brace in code.chars().filter(|c| "{}".contains(*c)) {
            match brace {
                '{' => blocks.push(code.to_string()),
                _ => drop(blocks.pop()),
            }
        }
    }
    found
}

#[test]
fn the_lint_can_fail() {
    assert!(broken_rule("    var x: f32;").is_some());
    assert!(broken_rule("    let m = bitcast<f32>(0xFF800000u);").is_some());
    assert!(broken_rule("    var x = 0.0; // 0x7f800000").is_none());
    let wrong = "fn f() {\nif (lane == 0u) {\n// why\nworkgroupBarrier();\n}\n}\n";
    assert_eq!(misplaced_barriers(wrong).len(), 1);
    let wrong = "fn f() {\nif (row > 3u) {\nreturn;\n}\n// why\nworkgroupBarrier();\n}\n";
    assert_eq!(misplaced_barriers(wrong).len(), 1);
    assert_eq!(
        misplaced_barriers("fn f() {\nworkgroupBarrier();\n}\n").len(),
        1
    );
    let right = "fn f() {\nif (number >= params.groups) {\nreturn;\n}\nfor (var i = 0u; i < N; i++) {\n// why\nworkgroupBarrier();\n}\n}\n";
    assert_eq!(misplaced_barriers(right), []);
}

#[test]
fn the_readme_and_the_architecture_list_every_kernel() {
    let readme = include_str!("../README.md");
    let architecture = include_str!("../ARCHITECTURE.md");
    for kernel in KERNELS {
        let row = format!("| `{}` | {} |", kernel.name, kernel.summary);
        assert!(readme.contains(&row), "README.md lacks the row {row}");
        let row = format!("| `{}` |", kernel.name);
        assert!(
            architecture.contains(&row),
            "ARCHITECTURE.md lacks a row {row}"
        );
    }
}

/// A kernel that does not match its descriptor is told apart.
#[test]
fn reflection_can_fail() {
    let kernel = KERNELS[0];
    let configuration = (kernel.configurations)().remove(0);
    let source = kernel.assemble(&configuration).expect("assembles");
    let swapped = source.replace("@binding(0)", "@binding(9)");
    assert!(
        !reflect::reflect(&swapped)
            .expect("valid")
            .binds(kernel.bound(&configuration))
    );
    let writable = source.replacen("var<storage, read> q", "var<storage, read_write> q", 1);
    assert!(
        !reflect::reflect(&writable)
            .expect("valid")
            .binds(kernel.bound(&configuration))
    );
    assert!(reflect::reflect(&source.replace("fn key_limit(", "fn key_limits(")).is_err());
}
