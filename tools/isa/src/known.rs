//! Configurations that are known to spill SGPRs and are shipped all the same, each with its reason.
//!
//! SGPRs go to lanes of VGPRs and not to memory, so it costs little. No reason excuses what goes to memory.
//!
//! `--check` fails where another one spills, and where one that is covered here does not: the list stays true.

use wgpu_attention::kernels::Configuration;

/// Configurations that spill SGPRs.
#[derive(Debug)]
pub(crate) struct Known {
    /// The GPUs: `navi21`, `navi31`.
    pub(crate) gpus: &'static [&'static str],
    /// The kernel.
    pub(crate) kernel: &'static str,
    /// Constants that its configuration has; others may be anything.
    pub(crate) constants: &'static [(&'static str, u32)],
    /// Why they are shipped.
    pub(crate) reason: &'static str,
}

/// All of them.
pub(crate) const KNOWN: &[Known] = &[Known {
    gpus: &["navi21", "navi31"],
    kernel: "decode_tiled",
    constants: &[("ROWS", 8)],
    reason: "each of 8 rows has lengths, limits, a slope and flags of its own, the same for all lanes: more than the SGPRs hold",
}];

impl Known {
    /// Whether it speaks of this configuration.
    pub(crate) fn covers(&self, gpu: &str, kernel: &str, configuration: &Configuration) -> bool {
        let has = |constant: &(&str, u32)| configuration.consts.iter().any(|own| own == constant);
        self.gpus.contains(&gpu) && self.kernel == kernel && self.constants.iter().all(has)
    }
}
