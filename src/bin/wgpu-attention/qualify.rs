//! `qualify`: whether the faster tiers of arithmetic that an adapter has are right on it.

use crate::{BackendOption, Verdict, say};
use clap::Args;
use wgpu_attention::{Gpu, GpuOptions, Result, Tier};

#[derive(Args)]
#[command(after_help = "\
Tiers are off until Gpu::qualify has found them right on the very device. One that is wrong or refused stays off and is told; \
that is the driver's fault, and the exit status is 0.")]
pub(crate) struct Options {
    /// Do not try what wgpu calls experimental: cooperative matrices
    #[arg(long)]
    no_experimental: bool,
    /// Part of the adapter's name
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
    /// The backend
    #[arg(long, value_enum)]
    backend: Option<BackendOption>,
}

pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let gpu = Gpu::open_blocking(&GpuOptions {
        adapter_name: options.adapter.clone(),
        backends: options.backend.map(BackendOption::backends),
        experimental: !options.no_experimental,
        ..Default::default()
    })?;
    say(format_args!("adapter     {}", gpu.describe()));
    let (_, found) = gpu.qualify_blocking()?;
    for tier in Tier::FASTER {
        match found.iter().find(|one| one.tier == tier) {
            Some(one) => say(one),
            None => say(format_args!(
                "{tier}: not on this adapter, or not by this driver"
            )),
        }
    }
    Ok(Verdict::Right)
}
