//! `info`: every adapter, and what it can run.

use crate::{Verdict, say};
use clap::Args;
use serde_json::{Value, json};
use wgpu_attention::kernels::KERNELS;
use wgpu_attention::{AdapterReport, Error, Result, adapters_blocking, install_hint};

#[derive(Args)]
pub(crate) struct Options {
    /// One JSON document instead of text
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let adapters = adapters_blocking(&Default::default())?;
    if adapters.is_empty()
        && let Err(error @ Error::AdapterNotFound { .. }) = crate::open(&None, None)
    {
        // There are adapters, but the environment asks for others.
        return Err(error);
    }
    if options.json {
        let list: Vec<Value> = adapters.iter().map(as_json).collect();
        say(format_args!("{:#}", json!({ "adapters": list })));
    } else if adapters.is_empty() {
        say(format_args!("no adapter. {}", install_hint()));
    } else {
        for (number, adapter) in adapters.iter().enumerate() {
            if number > 0 {
                say("");
            }
            print(adapter, number == 0);
        }
    }
    Ok(Verdict::Right)
}

/// The features that matter here, now or for faster kernels to come.
fn features(adapter: &AdapterReport) -> Vec<&'static str> {
    use wgpu_attention::wgpu::Features;
    [
        (Features::TIMESTAMP_QUERY, "timestamps"),
        (Features::SHADER_F16, "f16"),
        (Features::SUBGROUP, "subgroups"),
        (Features::SHADER_INT64, "64-bit integers"),
        (Features::IMMEDIATES, "immediates"),
        (
            Features::EXPERIMENTAL_COOPERATIVE_MATRIX,
            "cooperative matrix",
        ),
    ]
    .into_iter()
    .filter(|(feature, _)| adapter.features.contains(*feature))
    .map(|(_, name)| name)
    .collect()
}

/// Each kernel, and why the adapter cannot run it if it cannot.
fn kernels(adapter: &AdapterReport) -> Vec<(&'static str, &'static str, Option<String>)> {
    KERNELS
        .iter()
        .map(|kernel| {
            let refusal = adapter.capabilities.can_run(kernel).err();
            (
                kernel.name,
                kernel.summary,
                refusal.map(|error| error.to_string()),
            )
        })
        .collect()
}

fn print(adapter: &AdapterReport, first: bool) {
    let (info, limits) = (&adapter.info, &adapter.capabilities);
    let driver = format!("{} {}", info.driver, info.driver_info);
    let (smallest, largest) = limits.subgroup_sizes;
    let features = features(adapter);
    let bytes = |bytes: u64| format!("{} MiB", bytes >> 20);
    say(format_args!(
        "{}{}",
        info.name,
        if first { "  (what `run` takes)" } else { "" }
    ));
    say(format_args!("  backend    {}", adapter.backend()));
    say(format_args!("  type       {}", adapter.device_type()));
    say(format_args!(
        "  driver     {}",
        if driver.trim().is_empty() {
            "not told"
        } else {
            driver.trim()
        }
    ));
    say(format_args!(
        "  features   {}",
        if features.is_empty() {
            "none that matter here".into()
        } else {
            features.join(", ")
        }
    ));
    if features.contains(&"subgroups") {
        say(format_args!(
            "  subgroups  {smallest} to {largest} invocations"
        ));
    }
    say(format_args!(
        "  limits     binding {}, buffer {}, workgroup memory {} KiB, {} invocations, {} storage buffers",
        bytes(limits.max_binding_bytes),
        bytes(limits.max_buffer_bytes),
        limits.max_workgroup_bytes >> 10,
        limits.max_invocations,
        limits.max_storage_buffers,
    ));
    say("  kernels");
    for (name, summary, refusal) in kernels(adapter) {
        match refusal {
            None => say(format_args!("    {name:<16} {summary}")),
            Some(refusal) => say(format_args!("    {name:<16} cannot run: {refusal}")),
        }
    }
}

fn as_json(adapter: &AdapterReport) -> Value {
    let (info, limits) = (&adapter.info, &adapter.capabilities);
    let kernels: Vec<Value> = kernels(adapter)
        .into_iter()
        .map(|(name, _, refusal)| json!({ "name": name, "runs": refusal.is_none(), "reason": refusal }))
        .collect();
    json!({
        "name": info.name,
        "backend": adapter.backend(),
        "type": adapter.device_type(),
        "driver": info.driver,
        "driver_info": info.driver_info,
        "vendor": info.vendor,
        "device": info.device,
        "features": features(adapter),
        "limits": {
            "max_storage_buffer_binding_size": limits.max_binding_bytes,
            "max_buffer_size": limits.max_buffer_bytes,
            "max_compute_workgroup_storage_size": limits.max_workgroup_bytes,
            "max_compute_invocations_per_workgroup": limits.max_invocations,
            "max_compute_workgroups_per_dimension": limits.max_groups_per_axis,
            "max_storage_buffers_per_shader_stage": limits.max_storage_buffers,
            "min_storage_buffer_offset_alignment": limits.storage_alignment,
            "min_subgroup_size": limits.subgroup_sizes.0,
            "max_subgroup_size": limits.subgroup_sizes.1,
        },
        "kernels": kernels,
    })
}
