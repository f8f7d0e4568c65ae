//! Every kernel against the f64 reference, at sizes below, on and above every tile edge; and what must hold of every
//! kernel whatever the numbers.
//!
//! Outputs are poisoned with NaN and guarded; buffers are recycled dirty; hidden keys and values hold NaN and infinity.
//! The tolerance is `Tolerance::F32` throughout. Comments name public fault reports of other libraries that a test
//! rules out here.
// A test that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use support::check::*;
use support::{Guarded, Random, gpu, leave_dirt, run};
use wgpu_attention::CausalAlignment::{BottomRight, TopLeft};
use wgpu_attention::kernels::{HEAD_DIMS, Operation, compiled_head_dim};
use wgpu_attention::reference;
use wgpu_attention::{
    AttentionArguments, AttentionProblem, CausalAlignment, ElementType, Gpu, LinearProblem, Tensor,
};

/// Sizes below, on and above the edges of every tile in use (8, 16, 32, 64, 128).
const EDGES: [usize; 16] = [
    1, 2, 3, 7, 8, 9, 15, 17, 31, 32, 33, 63, 64, 65, 127, 129,
];

const CAUSAL: [Option<CausalAlignment>; 3] = [None, Some(TopLeft), Some(BottomRight)];

/// Cycles through lists of coprime lengths, so that a table of sizes meets every combination of the rest.
struct Cycle(usize);

impl Cycle {
    fn pick<T: Copy>(&self, from: &[T]) -> T {
        from[self.0 % from.len()]
    }
}

#[test]
fn every_configuration_of_attention_matches_the_reference() {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    let mut number = 0;
    for size in HEAD_DIMS {
        let smaller = HEAD_DIMS.iter().rev().find(|other| **other < size);
        let lowest = smaller.map_or(1, |other| *other as usize + 1);
        for hide in [Hide::NoMask, Hide::Random, Hide::Item] {
            for head_dim in [lowest, size as usize - 1, size as usize] {
                // Not a multiple of any tile, and at least two of the largest.
                let case = AttentionCase {
                    hide,
                    causal: CAUSAL[number % 3],
                    layout: LAYOUTS[number % 5],
                    seed: number as u64,
                    ..AttentionCase::new(2, 2, 69, 37 + number % 40, head_dim)
                };
                number += 1;
                let prepared = case.prepare();
                let masked = case.hide != Hide::NoMask;
                let wanted = configurations(Operation::Attention, |configuration| {
                    configuration.get("HEAD_DIM") == size
                        && configuration.rules.iter().any(|rule| rule.name == "rules/key_mask")
                            == masked
                });
                for subject in &wanted {
                    let result = prepared.check(&gpu, subject);
                    failures.note(format!("{subject} {case:?}"), result);
                }
            }
        }
    }
    failures.report(100);
}
