//! Kernels that are broken on purpose, each in one way that attention kernels are known to break. The check that
//! every kernel must pass has to reject every one of them: a check that cannot fail shows nothing.
//!
//! A broken kernel is a kernel of the table with a textual edit. An edit that no longer applies fails the test, so
//! that the list follows the kernels.
// A test that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use support::check::*;
use wgpu_attention::Alignment::{BottomRight, TopLeft};
use wgpu_attention::kernels::{Form, Fragment, Kernel, Operation, find};
use wgpu_attention::{AttentionProblem, AttentionRules, Gpu, wgpu};

/// In which file, which text, and what stands there instead. The text occurs exactly once.
type Edit = (&'static str, &'static str, &'static str);

struct Mutant {
    name: &'static str,
    kernel: &'static str,
    edits: &'static [Edit],
}

const fn mutant(name: &'static str, kernel: &'static str, edits: &'static [Edit]) -> Mutant {
    Mutant {
        name,
        kernel,
        edits,
    }
}

const TILED: &str = "attention_tiled";
const LANES: &str = "attention_lanes";
const ITEM: &str = "shared/item";
const MASK: &str = "rules/mask";

static ATTENTION_MUTANTS: &[Mutant] = &[
    mutant(
        "wrong scale",
        TILED,
        &[(TILED, "* params.scale", "* (params.scale * 1.01)")],
    ),
    mutant(
        "wrong scale",
        LANES,
        &[(LANES, "* params.scale", "* (params.scale * 1.01)")],
    ),
    mutant("scale ignored", TILED, &[(TILED, "* params.scale", "")]),
    mutant("scale ignored", LANES, &[(LANES, "* params.scale", "")]),
    mutant(
        "dropped tail tile of keys",
        TILED,
        &[(
            TILED,
            "first_key < seen_by_any; first_key += BLOCK_K",
            "first_key + BLOCK_K <= seen_by_any; first_key += BLOCK_K",
        )],
    ),
    mutant(
        "dropped last key",
        LANES,
        &[(
            LANES,
            "key < seen_by_any; key++",
            "key + 1u < seen_by_any; key++",
        )],
    ),
    mutant(
        "padding scored 0",
        TILED,
        &[(
            TILED,
            "if (key < limit[r] &&",
            "if ((key >= params.kv_len || key < limit[r]) &&",
        )],
    ),
    mutant(
        "keys past the end counted",
        LANES,
        &[
            (
                LANES,
                "key < seen_by_any; key++",
                "key < (seen_by_any + 7u) / 8u * 8u; key++",
            ),
            (
                LANES,
                "visible[r] = key < limit[r] &&",
                "visible[r] = (key >= params.kv_len || key < limit[r]) &&",
            ),
        ],
    ),
    mutant(
        "padded channels counted",
        LANES,
        &[
            (
                LANES,
                "select(0.0, q[base + min(d, last_channel)] * params.scale, d < params.head_dim)",
                "q[base + min(d, last_channel)] * params.scale",
            ),
            (
                LANES,
                "select(0.0, k[k_row + min(d, last_channel)], d < params.head_dim)",
                "k[k_row + min(d, last_channel)]",
            ),
        ],
    ),
    mutant(
        "floor of 0 under the maximum",
        TILED,
        &[(
            TILED,
            "                    top = peak;",
            "                    top = max(top, peak);",
        )],
    ),
    mutant(
        "floor of 0 under the maximum",
        LANES,
        &[(
            LANES,
            "select(highest[r], score[r], total[r] == 0.0)",
            "highest[r]",
        )],
    ),
    mutant(
        "floor of -80 under the maximum",
        TILED,
        &[(
            TILED,
            "                    top = peak;",
            "                    top = max(-80.0, peak);",
        )],
    ),
    mutant(
        "floor of -80 under the maximum",
        LANES,
        &[(
            LANES,
            "select(highest[r], score[r], total[r] == 0.0)",
            "select(highest[r], max(-80.0, score[r]), total[r] == 0.0)",
        )],
    ),
    mutant(
        "no maximum subtracted",
        TILED,
        &[
            (
                TILED,
                "exp(score[r * KEYS + c] - top)",
                "exp(score[r * KEYS + c])",
            ),
            (TILED, "exp(select(0.0, highest[r] - top, seen[r]))", "1.0"),
        ],
    ),
    mutant(
        "no maximum subtracted",
        LANES,
        &[
            (LANES, "select(factor, 1.0, rises)", "exp(score[r])"),
            (
                LANES,
                "shrink[r] = select(1.0, factor, rises && counts);",
                "shrink[r] = 1.0;",
            ),
        ],
    ),
    mutant(
        "total not shrunk when the maximum rises",
        TILED,
        &[(TILED, "total[r] = total[r] * shrink;", "")],
    ),
    mutant(
        "total not shrunk when the maximum rises",
        LANES,
        &[(
            LANES,
            "fma(total[r], shrink[r], weight[r])",
            "(total[r] + weight[r])",
        )],
    ),
    mutant(
        "sum not shrunk when the maximum rises",
        TILED,
        &[(
            TILED,
            "sum[r * COLUMNS + c] = sum[r * COLUMNS + c] * shrink;",
            "",
        )],
    ),
    mutant(
        "sum not shrunk when the maximum rises",
        LANES,
        &[(
            LANES,
            "sum[r * HEAD_DIM + d] * shrink[r]",
            "sum[r * HEAD_DIM + d]",
        )],
    ),
    mutant(
        "last row not stored",
        TILED,
        &[(TILED, "if (row <= last_query)", "if (row < last_query)")],
    ),
    mutant(
        "last row not stored",
        LANES,
        &[(LANES, "if (row <= last_query)", "if (row < last_query)")],
    ),
    mutant(
        "row past the end stored",
        TILED,
        &[(
            TILED,
            "if (row <= last_query)",
            "if (row <= last_query + 1u)",
        )],
    ),
    mutant(
        "row past the end stored",
        LANES,
        &[(
            LANES,
            "if (row <= last_query)",
            "if (row <= last_query + 1u)",
        )],
    ),
    mutant(
        "channel past the end stored",
        TILED,
        &[(
            TILED,
            "if (channel < params.head_dim) {\n                    //",
            "if (channel <= params.head_dim) {\n                    //",
        )],
    ),
    mutant(
        "channel past the end stored",
        LANES,
        &[(
            LANES,
            "if (d < params.head_dim)",
            "if (d <= params.head_dim)",
        )],
    ),
    mutant(
        "a key too few under causality",
        TILED,
        &[(RANGE, "params.causal_offset + 1", "params.causal_offset")],
    ),
    mutant(
        "a key too few under causality",
        LANES,
        &[(RANGE, "params.causal_offset + 1", "params.causal_offset")],
    ),
    mutant(
        "a key too many under causality",
        TILED,
        &[(
            RANGE,
            "params.causal_offset + 1",
            "params.causal_offset + 2",
        )],
    ),
    mutant(
        "a key too many under causality",
        LANES,
        &[(
            RANGE,
            "params.causal_offset + 1",
            "params.causal_offset + 2",
        )],
    ),
    mutant(
        "causality ignored",
        TILED,
        &[(RANGE, "params.causal == 0u", "true")],
    ),
    mutant(
        "causality ignored",
        LANES,
        &[(RANGE, "params.causal == 0u", "true")],
    ),
    mutant(
        "causal corner ignored",
        TILED,
        &[(RANGE, "params.causal_offset + 1", "1")],
    ),
    mutant(
        "causal corner ignored",
        LANES,
        &[(RANGE, "params.causal_offset + 1", "1")],
    ),
    mutant(
        "causality only by tiles",
        TILED,
        &[(TILED, "if (key < limit[r] &&", "if (key < seen_by_any &&")],
    ),
    mutant(
        "batch stride of q ignored",
        TILED,
        &[(TILED, "batch * params.q_batch_stride", "0u")],
    ),
    mutant(
        "batch stride of q ignored",
        LANES,
        &[(LANES, "batch * params.q_batch_stride", "0u")],
    ),
    mutant(
        "batch stride of k ignored",
        TILED,
        &[(TILED, "batch * params.k_batch_stride", "0u")],
    ),
    mutant(
        "batch stride of k ignored",
        LANES,
        &[(LANES, "batch * params.k_batch_stride", "0u")],
    ),
    mutant(
        "batch stride of v ignored",
        TILED,
        &[(TILED, "batch * params.v_batch_stride", "0u")],
    ),
    mutant(
        "batch stride of v ignored",
        LANES,
        &[(LANES, "batch * params.v_batch_stride", "0u")],
    ),
    mutant(
        "batch stride of the output ignored",
        TILED,
        &[(TILED, "batch * params.out_batch_stride", "0u")],
    ),
    mutant(
        "batch stride of the output ignored",
        LANES,
        &[(LANES, "batch * params.out_batch_stride", "0u")],
    ),
    mutant(
        "batch stride of the mask ignored",
        TILED,
        &[(MASK, "batch * params.mask_batch_stride", "0u")],
    ),
    mutant(
        "batch stride of the mask ignored",
        LANES,
        &[(MASK, "batch * params.mask_batch_stride", "0u")],
    ),
    mutant(
        "head of q ignored",
        TILED,
        &[(TILED, "head * params.q_head_stride", "0u")],
    ),
    mutant(
        "head of q ignored",
        LANES,
        &[(LANES, "head * params.q_head_stride", "0u")],
    ),
    mutant(
        "head of k ignored",
        TILED,
        &[(TILED, "head * params.k_head_stride", "0u")],
    ),
    mutant(
        "head of k ignored",
        LANES,
        &[(LANES, "head * params.k_head_stride", "0u")],
    ),
    mutant(
        "v of the next head",
        TILED,
        &[(
            TILED,
            "head * params.v_head_stride",
            "(head + 1u) % params.heads * params.v_head_stride",
        )],
    ),
    mutant(
        "v of the next head",
        LANES,
        &[(
            LANES,
            "head * params.v_head_stride",
            "(head + 1u) % params.heads * params.v_head_stride",
        )],
    ),
    mutant(
        "offset of q ignored",
        TILED,
        &[(TILED, "params.q_offset", "0u")],
    ),
    mutant(
        "offset of q ignored",
        LANES,
        &[(LANES, "params.q_offset", "0u")],
    ),
    mutant(
        "offset of the output ignored",
        TILED,
        &[(TILED, "params.out_offset", "0u")],
    ),
    mutant(
        "offset of the output ignored",
        LANES,
        &[(LANES, "params.out_offset", "0u")],
    ),
    mutant(
        "offset of the mask ignored",
        TILED,
        &[(MASK, "params.mask_offset", "0u")],
    ),
    mutant(
        "offset of the mask ignored",
        LANES,
        &[(MASK, "params.mask_offset", "0u")],
    ),
    mutant(
        "keys read by the stride of queries",
        TILED,
        &[(TILED, "params.k_token_stride", "params.q_token_stride")],
    ),
    mutant(
        "keys read by the stride of queries",
        LANES,
        &[(LANES, "params.k_token_stride", "params.q_token_stride")],
    ),
    mutant(
        "keys read as if contiguous",
        TILED,
        &[(TILED, "params.k_token_stride", "params.head_dim")],
    ),
    mutant(
        "keys read as if contiguous",
        LANES,
        &[(LANES, "params.k_token_stride", "params.head_dim")],
    ),
    mutant(
        "mask ignored",
        TILED,
        &[(MASK, "& 0xffu) != 0u", "& 0xffu) < 256u")],
    ),
    mutant(
        "mask ignored",
        LANES,
        &[(MASK, "& 0xffu) != 0u", "& 0xffu) < 256u")],
    ),
    mutant(
        "mask polarity flipped",
        TILED,
        &[(MASK, "& 0xffu) != 0u", "& 0xffu) == 0u")],
    ),
    mutant(
        "mask polarity flipped",
        LANES,
        &[(MASK, "& 0xffu) != 0u", "& 0xffu) == 0u")],
    ),
    mutant("mask read by words", TILED, &[(MASK, "byte % 4u", "0u")]),
    mutant("mask read by words", LANES, &[(MASK, "byte % 4u", "0u")]),
    mutant(
        "hidden values multiplied by 0",
        TILED,
        &[
            (
                TILED,
                "let weight = weights[(first_row + r) * BLOCK_K + first + j];",
                "let weight = max(0.0, weights[(first_row + r) * BLOCK_K + first + j]);",
            ),
            (TILED, "if (!(weight < 0.0))", "if (true)"),
        ],
    ),
    mutant(
        "hidden values multiplied by 0",
        LANES,
        &[
            (
                LANES,
                "fma(weight[r], v_d,",
                "fma(select(0.0, weight[r], visible[r]), v_d,",
            ),
            (
                LANES,
                "                    visible[r],\n                );",
                "                    true,\n                );",
            ),
        ],
    ),
    mutant(
        "hidden keys raise the maximum",
        LANES,
        &[(
            LANES,
            "select(highest[r], select(before, score[r], rises), counts)",
            "select(before, score[r], rises)",
        )],
    ),
    mutant(
        "hidden keys of full blocks used",
        TILED,
        &[(
            TILED,
            "HIDES_SINGLE_KEYS || first_key + BLOCK_K > seen_by_all;",
            "HIDES_SINGLE_KEYS;",
        )],
    ),
    mutant(
        "rows that see no key divided by 0",
        TILED,
        &[(
            TILED,
            "select(0.0, sum[r * COLUMNS + c] / row_total, seen[r])",
            "sum[r * COLUMNS + c] / row_total",
        )],
    ),
    mutant(
        "rows that see no key divided by 0",
        LANES,
        &[(
            LANES,
            "select(sum[r * HEAD_DIM + d] / divisor, 0.0, total[r] == 0.0)",
            "sum[r * HEAD_DIM + d] / divisor",
        )],
    ),
    mutant(
        "total of one invocation only",
        TILED,
        &[(
            TILED,
            "row_total = row_total + partial[(first_row + r) * SIDE + i];",
            "row_total = total[r];",
        )],
    ),
    mutant(
        "only the first chunk of channels",
        TILED,
        &[(
            TILED,
            "chunk < HEAD_DIM; chunk += CHUNK",
            "chunk < CHUNK; chunk += CHUNK",
        )],
    ),
    mutant(
        "only the first values of a block",
        TILED,
        &[(
            TILED,
            "first < BLOCK_K; first += VALUE_KEYS",
            "first < VALUE_KEYS; first += VALUE_KEYS",
        )],
    ),
];

const LTILED: &str = "linear_tiled";
const LLANES: &str = "linear_lanes";
const ROWS: &str = "shared/linear_params";

static LINEAR_MUTANTS: &[Mutant] = &[
    mutant(
        "bias ignored",
        LTILED,
        &[(LTILED, "params.has_bias != 0u", "false")],
    ),
    mutant(
        "bias ignored",
        LLANES,
        &[(LLANES, "params.has_bias != 0u", "false")],
    ),
    mutant(
        "offset of the bias ignored",
        LTILED,
        &[(LTILED, "params.bias_offset + column", "column")],
    ),
    mutant(
        "offset of the bias ignored",
        LLANES,
        &[(LLANES, "params.bias_offset + column", "column")],
    ),
    mutant(
        "dropped tail tile of channels",
        LTILED,
        &[(
            LTILED,
            "first < params.d_in; first += DEPTH",
            "first + DEPTH <= params.d_in; first += DEPTH",
        )],
    ),
    mutant(
        "dropped last channel",
        LLANES,
        &[(LLANES, "i < params.d_in; i++", "i + 1u < params.d_in; i++")],
    ),
    mutant(
        "channels past the end counted",
        LTILED,
        &[(
            LTILED,
            "row < params.rows && channel < params.d_in",
            "row < params.rows",
        )],
    ),
    mutant(
        "channels past the end counted",
        LLANES,
        &[(
            LLANES,
            "i < params.d_in; i++",
            "i < (params.d_in + 3u) / 4u * 4u; i++",
        )],
    ),
    mutant(
        "last row not stored",
        LTILED,
        &[(
            LTILED,
            "if (row < params.rows) {",
            "if (row + 1u < params.rows) {",
        )],
    ),
    mutant(
        "last row not stored",
        LLANES,
        &[(
            LLANES,
            "if (row < params.rows) {",
            "if (row + 1u < params.rows) {",
        )],
    ),
    mutant(
        "row past the end stored",
        LTILED,
        &[(
            LTILED,
            "if (row < params.rows) {",
            "if (row <= params.rows) {",
        )],
    ),
    mutant(
        "row past the end stored",
        LLANES,
        &[(
            LLANES,
            "if (row < params.rows) {",
            "if (row <= params.rows) {",
        )],
    ),
    mutant(
        "last column not stored",
        LTILED,
        &[(
            LTILED,
            "if (column < params.d_out) {",
            "if (column + 1u < params.d_out) {",
        )],
    ),
    mutant(
        "last column not stored",
        LLANES,
        &[(
            LLANES,
            "if (column < params.d_out) {",
            "if (column + 1u < params.d_out) {",
        )],
    ),
    mutant(
        "column past the end stored",
        LTILED,
        &[(
            LTILED,
            "if (column < params.d_out) {",
            "if (column <= params.d_out) {",
        )],
    ),
    mutant(
        "column past the end stored",
        LLANES,
        &[(
            LLANES,
            "if (column < params.d_out) {",
            "if (column <= params.d_out) {",
        )],
    ),
    mutant(
        "batch strides ignored",
        LTILED,
        &[(ROWS, "(row / params.tokens) * batch_stride", "0u")],
    ),
    mutant(
        "batch strides ignored",
        LLANES,
        &[(ROWS, "(row / params.tokens) * batch_stride", "0u")],
    ),
    mutant(
        "channel stride of x ignored",
        LTILED,
        &[(LTILED, "channel * params.x_channel_stride", "channel")],
    ),
    mutant(
        "channel stride of x ignored",
        LLANES,
        &[(LLANES, "i * params.x_channel_stride", "i")],
    ),
    mutant(
        "channel stride of the weight ignored",
        LTILED,
        &[(LTILED, "channel * params.weight_in_stride", "channel")],
    ),
    mutant(
        "channel stride of the weight ignored",
        LLANES,
        &[(LLANES, "i * params.weight_in_stride", "i")],
    ),
    mutant(
        "row stride of the weight ignored",
        LTILED,
        &[(
            LTILED,
            "column * params.weight_out_stride",
            "column * params.d_in",
        )],
    ),
    mutant(
        "row stride of the weight ignored",
        LLANES,
        &[(LLANES, "* params.weight_out_stride", "* params.d_in")],
    ),
    mutant(
        "channel stride of y ignored",
        LTILED,
        &[(LTILED, "column * params.y_channel_stride", "column")],
    ),
    mutant(
        "channel stride of y ignored",
        LLANES,
        &[(LLANES, "column * params.y_channel_stride", "column")],
    ),
    mutant(
        "offset of x ignored",
        LTILED,
        &[(LTILED, "params.x_offset + ", "")],
    ),
    mutant(
        "offset of x ignored",
        LLANES,
        &[(LLANES, "params.x_offset + ", "")],
    ),
    mutant(
        "offset of y ignored",
        LTILED,
        &[(LTILED, "params.y_offset + ", "")],
    ),
    mutant(
        "offset of y ignored",
        LLANES,
        &[(LLANES, "params.y_offset + ", "")],
    ),
    mutant(
        "offset of the weight ignored",
        LTILED,
        &[(LTILED, "params.weight_offset + ", "")],
    ),
    mutant(
        "offset of the weight ignored",
        LLANES,
        &[(LLANES, "params.weight_offset\n            + ", "")],
    ),
];

/// A text with `from`, which occurs once, replaced.
fn edited(text: &str, (file, from, to): Edit) -> String {
    let count = text.matches(from).count();
    assert_eq!(count, 1, "{file}.wgsl holds {count} times `{from}`");
    text.replace(from, to)
}

/// The kernel of that name with the edits.
fn broken(name: &str, edits: &[Edit]) -> Subject {
    let mut kernel: Kernel = find(name).unwrap().clone();
    let mut rules: Vec<Fragment> = Vec::new();
    for edit in edits {
        let fragment = |from: &Fragment| Fragment {
            name: from.name.clone(),
            source: edited(&from.source, *edit).into(),
        };
        if edit.0 == kernel.name {
            kernel.source = Box::leak(edited(kernel.source, *edit).into_boxed_str());
        } else if let Some(at) = rules.iter().position(|rule| rule.name == edit.0) {
            rules[at] = fragment(&rules[at]);
        } else if edit.0.starts_with("rules/") {
            let mut all = (kernel.configurations)().into_iter().flat_map(|c| c.rules);
            let found = all.find(|rule| rule.name == edit.0);
            rules.push(fragment(
                &found.unwrap_or_else(|| panic!("no rule {}", edit.0)),
            ));
        } else {
            let mut fragments = kernel.fragments.to_vec();
            let at = fragments.iter().position(|f| f.name == edit.0);
            let at = at.unwrap_or_else(|| panic!("{name} has no fragment {}", edit.0));
            fragments[at] = Box::leak(Box::new(fragment(fragments[at])));
            kernel.fragments = Box::leak(fragments.into_boxed_slice());
        }
    }
    Subject {
        kernel: Box::leak(Box::new(kernel)),
        configuration: None,
        fold: None,
        rules,
    }
}

/// Few cases, chosen so that each broken kernel fails one of them; those that compile fast come first.
fn attention_cases() -> Vec<PreparedAttention> {
    let mut cases: Vec<PreparedAttention> = [
        AttentionCase {
            causal: Some(TopLeft),
            ..AttentionCase::new(2, 3, 44, 44, 5)
        },
        // q lies alone, k and v side by side.
        AttentionCase {
            layout: Layout::Fused,
            ..AttentionCase::new(1, 2, 9, 39, 8)
        },
    ]
    .iter()
    .map(AttentionCase::prepare)
    .collect();
    // Scores far below, falling, and rising from key to key.
    let scores: [fn(usize) -> f32; 3] =
        [|_| -200.0, |key| 200.0 - key as f32, |key| key as f32 * 0.2];
    for score in scores {
        let problem = AttentionProblem {
            kv_len: 45,
            rules: AttentionRules {
                scale: Some(1.0),
                ..Default::default()
            },
            ..AttentionProblem::new(1, 1, 3, 1)
        };
        let data = AttentionData::new(
            problem,
            |_, _, _, _| 1.0,
            |_, t, _, _| score(t),
            |_, t, _, _| 1.0 + t as f32,
        );
        cases.push(data.prepare());
    }
    let slower = [
        AttentionCase {
            hide: Hide::Random,
            poison: false,
            layout: Layout::Offset,
            ..AttentionCase::new(2, 1, 9, 65, 8)
        },
        AttentionCase {
            causal: Some(BottomRight),
            hide: Hide::Item,
            layout: Layout::Padded,
            ..AttentionCase::new(3, 2, 43, 37, 5)
        },
        // More than one row a lane.
        AttentionCase {
            causal: Some(TopLeft),
            ..AttentionCase::new(2, 2, 70, 70, 8)
        },
        // More than one chunk of channels, and values in more than one part.
        AttentionCase {
            seed: 9,
            ..AttentionCase::new(1, 1, 9, 70, 72)
        },
    ];
    cases.extend(slower.iter().map(AttentionCase::prepare));
    cases
}

fn linear_cases() -> Vec<PreparedLinear> {
    // Small tiles, then large ones.
    [(2, 19), (3, 67)]
        .into_iter()
        .flat_map(|(batch, tokens)| {
            LINEAR_LAYOUTS.map(|layout| LinearCase {
                layout,
                ..LinearCase::new(batch, tokens, 37, 45)
            })
        })
        .map(|case| case.prepare())
        .collect()
}

/// Whether a case fails. A broken kernel that does not compile would fail for the wrong reason: that is an error.
fn rejected_by_attention(
    gpu: &Gpu,
    cases: &[PreparedAttention],
    subject: &Subject,
) -> Result<bool, String> {
    for case in cases.iter().filter(|c| subject.takes(&c.data.problem)) {
        subject.attention(gpu, &case.data.problem)?;
        if case.check(gpu, subject).is_err() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The same for projections.
fn rejected_by_linear(
    gpu: &Gpu,
    cases: &[PreparedLinear],
    subject: &Subject,
) -> Result<bool, String> {
    for case in cases {
        subject.linear(gpu, &case.data.problem)?;
        if case.check(gpu, subject).is_err() {
            return Ok(true);
        }
    }
    Ok(false)
}

#[test]
fn kernels_as_they_are_pass_the_cases() {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    for subject in kernels(Operation::Attention) {
        let cases = attention_cases();
        for case in cases.iter().filter(|c| subject.takes(&c.data.problem)) {
            let what = format!("{subject} {:?}", case.data.problem);
            failures.note(what, case.check(&gpu, &subject));
        }
    }
    for subject in kernels(Operation::Linear) {
        for case in linear_cases() {
            let what = format!("{subject} {:?}", case.data.problem);
            failures.note(what, case.check(&gpu, &subject));
        }
    }
    failures.report(20);
}

/// Notes every broken kernel that `rejected` lets pass.
fn all_rejected(mutants: &[Mutant], rejected: impl Fn(&Subject) -> Result<bool, String>) {
    let mut failures = Failures::default();
    for Mutant {
        name,
        kernel,
        edits,
    } in mutants
    {
        let subject = broken(kernel, edits);
        let result = rejected(&subject).and_then(|rejected| match rejected {
            true => Ok(()),
            false => Err("not rejected".into()),
        });
        failures.note(format!("{kernel}: {name}"), result);
    }
    failures.report(mutants.len());
}

#[test]
fn broken_attention_is_rejected() {
    let Some(gpu) = gpu() else { return };
    let cases = attention_cases();
    all_rejected(ATTENTION_MUTANTS, |subject| {
        rejected_by_attention(&gpu, &cases, subject)
    });
}

#[test]
fn broken_projections_are_rejected() {
    let Some(gpu) = gpu() else { return };
    let cases = linear_cases();
    all_rejected(LINEAR_MUTANTS, |subject| {
        rejected_by_linear(&gpu, &cases, subject)
    });
}

/// Both forms are broken in the same ways, but for what only one of them has.
#[test]
fn every_kernel_has_broken_twins() {
    for mutants in [ATTENTION_MUTANTS, LINEAR_MUTANTS] {
        for form in [Form::Tiled, Form::Lanes] {
            let count = mutants
                .iter()
                .filter(|mutant| find(mutant.kernel).unwrap().form == form)
                .count();
            assert!(count >= 14, "{form:?}: {count}");
        }
    }
}

/// Barriers that a software adapter with SIMD vectors of 8 lanes cannot show to be missing, and why. (Vectors of 4
/// show them.)
static UNSEEN_BY_8_LANES: &[(&str, usize, &str)] = &[
    (
        TILED,
        2,
        "the eight invocations of a row, which exchange peaks here, are one vector and run in step",
    ),
    (
        TILED,
        5,
        "the eight invocations of a row, which exchange totals here, are one vector and run in step",
    ),
];

/// A kernel without one of its barriers is rejected: on a software adapter, whose invocations run in a fixed order,
/// so that a race shows every time.
#[test]
fn missing_barriers_are_rejected() {
    let Some(gpu) = gpu() else { return };
    let info = gpu.adapter_info();
    if info.device_type != wgpu::DeviceType::Cpu {
        eprintln!(
            "\n*** NOT TESTED: a race need not show on {} ***\n",
            info.name
        );
        return;
    }
    // Where the adapter does not tell its vectors' length, either is possible.
    let told = gpu.device().features().contains(wgpu::Features::SUBGROUP);
    let lanes = told.then_some(info.subgroup_min_size);
    let (attention, linear) = (attention_cases(), linear_cases());
    let mut failures = Failures::default();
    for name in [TILED, LTILED] {
        let source = find(name).unwrap().source;
        for (number, (at, barrier)) in source.match_indices("workgroupBarrier();").enumerate() {
            let mut text = source.to_string();
            text.replace_range(at..at + barrier.len(), "");
            let mut subject = broken(name, &[]);
            subject.kernel = Box::leak(Box::new(Kernel {
                source: Box::leak(text.into_boxed_str()),
                ..subject.kernel.clone()
            }));
            let unseen = UNSEEN_BY_8_LANES
                .iter()
                .find(|(kernel, n, _)| (*kernel, *n) == (name, number));
            let rejected = match subject.kernel.operation {
                Operation::Attention => rejected_by_attention(&gpu, &attention, &subject),
                Operation::Linear => rejected_by_linear(&gpu, &linear, &subject),
                other => Err(format!("no cases for {other:?}")),
            };
            let result = rejected.and_then(|rejected| match (rejected, unseen, lanes) {
                (true, None, _) | (_, Some(_), None) => Ok(()),
                (false, None, _) => Err("not rejected".into()),
                (false, Some(_), Some(lanes)) if lanes >= 8 => Ok(()),
                (true, Some(_), Some(lanes)) if lanes < 8 => Ok(()),
                (true, Some((.., why)), _) => Err(format!("rejected, though {why}")),
                (false, Some(_), Some(lanes)) => Err(format!("not rejected by vectors of {lanes}")),
            });
            failures.note(format!("{name}: barrier {number}"), result);
        }
    }
    failures.report(8);
}
