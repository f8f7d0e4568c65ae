//! Kernels that are broken on purpose, each in one way that attention kernels are known to break. The check that
//! every kernel must pass has to reject every one of them: a check that cannot fail shows nothing.
//!
//! A broken kernel is a kernel of the table with a textual edit. An edit that no longer applies fails the test, so
//! that the list follows the kernels.
// A test that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::cell::Cell;
use support::check::*;
use support::{Guarded, Random, run};
use wgpu_attention::Alignment::{BottomRight, TopLeft};
use wgpu_attention::compare::Tolerance;
use wgpu_attention::kernels::{Form, Fragment, KERNELS, Kernel, Operation, find};
use wgpu_attention::{
    AttentionProblem, AttentionRules, AttentionWeights, ElementType, Gpu, Merge, MergeArguments,
    MergeProblem, Tensor, TensorCopy, WeightsArguments, WeightsStage, reference, wgpu,
};

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
const BLOCKS: &str = "attention_blocks";
/// Which rows of a workgroup are stored.
const STORED: &str = "if (row < item.rows)";
const ITEM: &str = "shared/item";
const MASK: &str = "rules/mask";
const RULES: &str = "rules/scores";
const BIAS: &str = "rules/bias";
const PAIR: &str = "shared/pair";
const ELEMENTS: &str = "shared/elements";
const STORE: &str = "shared/store";
const STORE_LSE: &str = "shared/store_lse";
const DLANES: &str = "decode_lanes";
const DROWS: &str = "decode_rows";
const DTILED: &str = "decode_tiled";
const SHARE: &str = "shared/share";
const PAGES: &str = "rules/pages";
const ONLINE: &str = "shared/online";
const FOURS_ANY: &str = "shared/fours_any";
const TILES: &str = "shared/tiles_f32";
const FOURS_F32: &str = "shared/fours_f32";
const Q_OUT: &str = "shared/q_out_f32";
const Q_OUT_ANY: &str = "shared/q_out_any";
const ROWS_IN: &str = "shared/rows_in_subgroup";
const ROWS_OUT: &str = "shared/rows_out_subgroup";
const SPREAD: &str = "shared/spread_subgroup";
const SPREAD_EIGHTS: &str = "shared/spread_eights";
const EIGHTS_F32: &str = "shared/eights_f32";
const EIGHTS_HALF: &str = "shared/eights_half";
const SPREAD_WEIGHTS: &str = "shared/weights_subgroup";

static ATTENTION_MUTANTS: &[Mutant] = &[
    mutant(
        "wrong scale",
        BLOCKS,
        &[(Q_OUT, "* params.scale", "* (params.scale * 1.01)")],
    ),
    mutant(
        "wrong scale of rows that begin anywhere",
        BLOCKS,
        &[(Q_OUT_ANY, "* params.scale", "* (params.scale * 1.01)")],
    ),
    mutant(
        "dropped tail block of keys",
        BLOCKS,
        &[(
            BLOCKS,
            "first_key < seen_to; first_key += KEYS",
            "first_key + KEYS <= seen_to; first_key += KEYS",
        )],
    ),
    mutant(
        "sums not shrunk where the maximum rises",
        BLOCKS,
        &[(
            BLOCKS,
            "staged[at + r * LANES] * shrink[r]",
            "staged[at + r * LANES]",
        )],
    ),
    mutant(
        "total not shrunk where the maximum rises",
        BLOCKS,
        &[(BLOCKS, "row[r].total * shrink[r]", "row[r].total")],
    ),
    mutant(
        "one key too many",
        BLOCKS,
        &[(BLOCKS, "(j - before < count)", "(j - before <= count)")],
    ),
    mutant(
        "floor of 0 under the maximum",
        BLOCKS,
        &[(BLOCKS, "(!any | s > highest)", "(s > highest)")],
    ),
    mutant(
        "highest of the last block alone",
        BLOCKS,
        &[(
            BLOCKS,
            "var highest = row[r].highest;",
            "var highest = -1.0e30;",
        )],
    ),
    mutant(
        "the last group of a block missing",
        BLOCKS,
        &[(
            BLOCKS,
            "let v_fours = spread(v_four(v_rows[g], channel));",
            "let v_fours = spread(v_four(v_rows[g / 2u], channel));",
        )],
    ),
    mutant(
        "broadcasts of one lane",
        BLOCKS,
        &[(SPREAD, "subgroupBroadcast(mine, i)", "mine")],
    ),
    mutant(
        "rows of a lane confused",
        BLOCKS,
        &[(
            BLOCKS,
            "staged[at + r * LANES] = sum[r];",
            "staged[at + (ROWS - 1u - r) * LANES] = sum[r];",
        )],
    ),
    mutant(
        "padded channels counted",
        BLOCKS,
        &[
            (
                Q_OUT_ANY,
                "select(0.0, value, channel < params.head_dim)",
                "value",
            ),
            (
                FOURS_ANY,
                "select(vec4<f32>(), k_four_unmasked(row, channel), there)",
                "k_four_unmasked(row, channel)",
            ),
        ],
    ),
    mutant(
        "wrong scale",
        TILED,
        &[(
            TILES,
            "select(1.0, params.scale, of_q)",
            "select(1.0, params.scale * 1.01, of_q)",
        )],
    ),
    mutant(
        "wrong scale",
        LANES,
        &[(Q_OUT, "* params.scale", "* (params.scale * 1.01)")],
    ),
    mutant(
        "wrong scale of rows that begin anywhere",
        LANES,
        &[(Q_OUT_ANY, "* params.scale", "* (params.scale * 1.01)")],
    ),
    mutant(
        "scale ignored",
        TILED,
        &[(TILES, "select(1.0, params.scale, of_q)", "1.0")],
    ),
    mutant("scale ignored", LANES, &[(Q_OUT, "* params.scale", "")]),
    mutant(
        "dropped tail tile of keys",
        TILED,
        &[(
            TILED,
            "first_key < seen_to; first_key += BLOCK_K",
            "first_key + BLOCK_K <= seen_to; first_key += BLOCK_K",
        )],
    ),
    mutant(
        "dropped last key",
        LANES,
        &[(
            LANES,
            "let others = before + (seen_to - all_to);",
            "let others = before + max(seen_to - all_to, 1u) - 1u;",
        )],
    ),
    mutant(
        "padding scored 0",
        TILED,
        &[(
            TILED,
            "pair.visible & (key >= from_key) & (key < limit)",
            "pair.visible & (key >= from_key) & (key >= params.kv_len || key < limit)",
        )],
    ),
    mutant(
        "keys past the end counted",
        LANES,
        &[(LANES, "& (other + j < others)", "")],
    ),
    mutant(
        "keys of the last step counted twice",
        LANES,
        &[(LANES, "select(all_keys / KEYS * KEYS,", "select(all_keys,")],
    ),
    mutant(
        "keys that some rows do not see taken for seen",
        LANES,
        &[(
            LANES,
            "min(key_limit(item, first_query), seen_to)",
            "min(key_limit(item, first_query) + 2u, seen_to)",
        )],
    ),
    mutant(
        "broadcasts of one lane",
        LANES,
        &[(SPREAD, "subgroupBroadcast(mine, i)", "mine")],
    ),
    mutant(
        "broadcasts of one lane, by eights",
        LANES,
        &[(SPREAD_EIGHTS, "subgroupBroadcast(mine[0], i)", "mine[0]")],
    ),
    mutant(
        "rows of k and v taken for each other's",
        LANES,
        &[(SPREAD_EIGHTS, "lane >= j *", "lane > j *")],
    ),
    mutant(
        "the last lane that is needed loads nothing",
        LANES,
        &[(
            SPREAD_EIGHTS,
            "TOGETHER * LANES_OF_ROW >= LANES || lane < TOGETHER * LANES_OF_ROW",
            "lane + 1u < TOGETHER * LANES_OF_ROW",
        )],
    ),
    mutant(
        "eights of a row beside each other's",
        LANES,
        &[(
            SPREAD_EIGHTS,
            "lane % LANES_OF_ROW * 2u",
            "lane % LANES_OF_ROW",
        )],
    ),
    mutant(
        "padded eights of channels counted",
        LANES,
        &[
            (
                Q_OUT,
                "select(vec4<f32>(), four, channel < params.head_dim)",
                "four",
            ),
            (
                SPREAD_EIGHTS,
                "loads(lane) && channel < params.head_dim",
                "loads(lane)",
            ),
        ],
    ),
    mutant(
        "halves of 64 bits in the wrong order",
        LANES,
        &[(EIGHTS_F32, "low.x, high.x", "high.x, low.x")],
    ),
    mutant(
        "eights of k that begin elsewhere",
        LANES,
        &[(
            EIGHTS_F32,
            "k[(row + min(channel, params.head_dim - 8u)) / 8u]",
            "k[row / 8u + min(channel, params.head_dim - 8u)]",
        )],
    ),
    mutant(
        "eights of v that begin elsewhere",
        LANES,
        &[(
            EIGHTS_F32,
            "v[(row + min(channel, params.value_dim - 8u)) / 8u]",
            "v[row / 8u + min(channel, params.value_dim - 8u)]",
        )],
    ),
    mutant(
        "padded channels counted",
        LANES,
        &[
            (
                Q_OUT_ANY,
                "select(0.0, value, channel < params.head_dim)",
                "value",
            ),
            (
                FOURS_ANY,
                "select(vec4<f32>(), k_four_unmasked(row, channel), there)",
                "k_four_unmasked(row, channel)",
            ),
        ],
    ),
    mutant(
        "padded fours of channels counted",
        LANES,
        &[
            (
                Q_OUT,
                "select(vec4<f32>(), four, channel < params.head_dim)",
                "four",
            ),
            (
                FOURS_F32,
                "select(vec4<f32>(), k_four_unmasked(row, channel), channel < params.head_dim)",
                "k_four_unmasked(row, channel)",
            ),
        ],
    ),
    mutant(
        "rows brought to other lanes",
        LANES,
        &[(ROWS_IN, "lane == l)", "lane == LANES - 1u - l)")],
    ),
    mutant(
        "fours of a row in the wrong order",
        LANES,
        &[(
            ROWS_OUT,
            "first + lane, mine",
            "first + SPREAD - 1u - lane, mine",
        )],
    ),
    mutant(
        "each lane's own row stored for all lanes",
        LANES,
        &[(
            ROWS_OUT,
            "subgroupShuffle((*fours)[r * FOURS + first + i], l)",
            "(*fours)[r * FOURS + first + i]",
        )],
    ),
    mutant(
        "fours past the channels of the values stored",
        LANES,
        &[(Q_OUT, "if (channel < params.value_dim) {", "if (true) {")],
    ),
    mutant(
        "floor of 0 under the maximum",
        TILED,
        &[(
            TILED,
            "var top = highest;",
            "var top = max(highest, vec4<u32>(rank_of(0.0)));",
        )],
    ),
    mutant(
        "floor of 0 under the maximum",
        LANES,
        &[(
            ONLINE,
            "select(row.highest, score, row.total == 0.0)",
            "row.highest",
        )],
    ),
    mutant(
        "floor of -80 under the maximum",
        TILED,
        &[(
            TILED,
            "var top = highest;",
            "var top = max(highest, vec4<u32>(rank_of(-80.0)));",
        )],
    ),
    mutant(
        "floor of -80 under the maximum",
        LANES,
        &[(
            ONLINE,
            "select(row.highest, score, row.total == 0.0)",
            "select(row.highest, max(-80.0, score), row.total == 0.0)",
        )],
    ),
    mutant(
        "no maximum subtracted",
        TILED,
        &[
            (TILED, "exp(own - score_of(top[r]))", "exp(own)"),
            (
                TILED,
                "exp(select(0.0, score_of(highest[r]) - score_of(top[r]), highest[r] != 0u))",
                "1.0",
            ),
        ],
    ),
    mutant(
        "no maximum subtracted",
        LANES,
        &[
            (ONLINE, "select(factor, 1.0, rises)", "exp(score)"),
            (
                ONLINE,
                "let shrink = select(1.0, factor, rises & counts);",
                "let shrink = 1.0;",
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
            ONLINE,
            "fma(row.total, shrink, weight)",
            "(row.total + weight)",
        )],
    ),
    mutant(
        "sum not shrunk when the maximum rises",
        TILED,
        &[(
            TILED,
            "sum[r * COLUMN_FOURS + c] = sum[r * COLUMN_FOURS + c] * shrink;",
            "",
        )],
    ),
    mutant(
        "sum not shrunk when the maximum rises",
        LANES,
        &[(
            LANES,
            "(*sum)[r * FOURS + first + i] * shrink[r]",
            "(*sum)[r * FOURS + first + i]",
        )],
    ),
    mutant(
        "last row not stored",
        TILED,
        &[(TILED, STORED, "if (row + 1u < item.rows)")],
    ),
    mutant(
        "last row not stored",
        LANES,
        &[(
            LANES,
            "if (query < block.rows)",
            "if (query + 1u < block.rows)",
        )],
    ),
    mutant(
        "row past the end stored",
        TILED,
        &[(TILED, STORED, "if (row < item.rows + 1u)")],
    ),
    mutant(
        "row past the end stored",
        LANES,
        &[(
            LANES,
            "if (query < block.rows)",
            "if (query < block.rows + 1u)",
        )],
    ),
    mutant(
        "channel past the end stored",
        TILED,
        &[(
            TILED,
            "channel + 1u < params.value_dim",
            "channel < params.value_dim",
        )],
    ),
    mutant(
        "channel past the end stored",
        LANES,
        &[(
            Q_OUT_ANY,
            "channel + 1u < params.value_dim",
            "channel < params.value_dim",
        )],
    ),
    mutant(
        "causality only by tiles",
        TILED,
        &[(
            TILED,
            "pair.visible & (key >= from_key) & (key < limit)",
            "pair.visible & (key < seen_to)",
        )],
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
        &[(TILED, "kv_head * params.k_head_stride", "0u")],
    ),
    mutant(
        "head of k ignored",
        LANES,
        &[(LANES, "kv_head * params.k_head_stride", "0u")],
    ),
    mutant(
        "v of the next head",
        TILED,
        &[(
            TILED,
            "kv_head * params.v_head_stride",
            "(kv_head + 1u) % (params.heads / params.group) * params.v_head_stride",
        )],
    ),
    mutant(
        "v of the next head",
        LANES,
        &[(
            LANES,
            "kv_head * params.v_head_stride",
            "(kv_head + 1u) % (params.heads / params.group) * params.v_head_stride",
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
        "keys read by the stride of queries",
        TILED,
        &[(
            TILED,
            "key_row(item, key) * params.k_token_stride",
            "key_row(item, key) * params.q_token_stride",
        )],
    ),
    mutant(
        "keys read by the stride of queries",
        LANES,
        &[(
            LANES,
            "key_row(item, key) * params.k_token_stride",
            "key_row(item, key) * params.q_token_stride",
        )],
    ),
    mutant(
        "keys read as if contiguous",
        TILED,
        &[(
            TILED,
            "key_row(item, key) * params.k_token_stride",
            "key_row(item, key) * params.head_dim",
        )],
    ),
    mutant(
        "keys read as if contiguous",
        LANES,
        &[(
            LANES,
            "key_row(item, key) * params.k_token_stride",
            "key_row(item, key) * params.head_dim",
        )],
    ),
    mutant(
        "hidden values multiplied by 0",
        TILED,
        &[
            (
                TILED,
                "let four = bitcast<vec4<f32>>(exchange[w_from + i * Q_FOURS]);",
                "let four = max(vec4<f32>(), bitcast<vec4<f32>>(exchange[w_from + i * Q_FOURS]));",
            ),
            (TILED, "if (!(four[r] < 0.0))", "if (true)"),
        ],
    ),
    mutant(
        "one key of four tells whether any is hidden",
        TILED,
        &[(TILED, "signs |= weights[i];", "signs = weights[i];")],
    ),
    mutant(
        "negative scores ranked as positive ones",
        TILED,
        &[(TILED, "~bits, (bits >> 31u) != 0u)", "~bits, false)")],
    ),
    mutant(
        "queries written and read in different places",
        TILED,
        &[(TILED, "place(local.y, channel / 2u)", "local.y")],
    ),
    mutant(
        "weights written and read in different places",
        TILED,
        &[(TILED, "place(local.y, local.x)", "local.y")],
    ),
    mutant(
        "tiles of queries counted from the end, one off",
        TILED,
        &[(
            TILED,
            "params.q_tiles - 1u - tile",
            "(params.q_tiles - tile) % params.q_tiles * 2u",
        )],
    ),
    mutant(
        "hidden values multiplied by 0",
        LANES,
        &[(
            LANES,
            "select(vec4<f32>(), v_j, visible[r * KEYS + j])",
            "v_j",
        )],
    ),
    mutant(
        "hidden keys raise the maximum",
        LANES,
        &[(
            ONLINE,
            "select(row.highest, select(before, score, rises), counts)",
            "select(before, score, rises)",
        )],
    ),
    mutant(
        "hidden keys of full blocks used",
        TILED,
        &[(
            TILED,
            "HIDES_SINGLE_KEYS || first_key < full_from || first_key + BLOCK_K > full_to;",
            "HIDES_SINGLE_KEYS;",
        )],
    ),
    mutant(
        "rows that see no key divided by 0",
        TILED,
        &[(
            TILED,
            "select(0.0, four[c % 4u] / row_total[r], seen)",
            "(four[c % 4u] / row_total[r])",
        )],
    ),
    mutant(
        "rows that see no key divided by 0",
        LANES,
        &[(
            LANES,
            "select(sum[r * FOURS + d] / divisor, vec4<f32>(), none)",
            "(sum[r * FOURS + d] / divisor)",
        )],
    ),
    mutant(
        "total of one invocation only",
        TILED,
        &[(
            TILED,
            "row_total += bitcast<vec4<f32>>(exchange[local.y * ACROSS + i]);",
            "row_total = total;",
        )],
    ),
    mutant(
        "only the first chunk of channels",
        TILED,
        &[(
            TILED,
            "chunk < params.head_dim; chunk += CHUNK",
            "chunk < CHUNK; chunk += CHUNK",
        )],
    ),
    mutant(
        "only the first values of a slice",
        TILED,
        &[(
            TILED,
            "first < SLICE; first += VALUE_KEYS",
            "first < VALUE_KEYS; first += VALUE_KEYS",
        )],
    ),
    mutant(
        "only the first slice of a block",
        TILED,
        &[(TILED, "s < KEY_FOURS; s++", "s < 1u; s++")],
    ),
];

/// Broken kernels that problems with rules show.
static RULED_ATTENTION_MUTANTS: &[Mutant] = &[
    mutant(
        "half of 16 bits of its neighbour",
        LANES,
        &[(EIGHTS_HALF, "value_of(high, 0u", "value_of(high, 1u")],
    ),
    mutant(
        "eights of 16 bits that begin elsewhere",
        LANES,
        &[(
            EIGHTS_HALF,
            "v[(row + min(channel, params.value_dim - 8u)) / 8u]",
            "v[row / 8u + min(channel, params.value_dim - 8u)]",
        )],
    ),
    mutant(
        "rules of a key hide its neighbour",
        BLOCKS,
        &[(
            BLOCKS,
            "u32(pair.visible) << bit",
            "u32(pair.visible) << (bit ^ 1u)",
        )],
    ),
    mutant(
        "hidden values reach a row",
        BLOCKS,
        &[(BLOCKS, "if_seen(v_fours[i], w)", "v_fours[i]")],
    ),
    mutant(
        "windows of full blocks seen by rows past them",
        TILED,
        &[(TILED, "first_key < full_from || ", "")],
    ),
    mutant(
        "rows past an item's queries see full blocks",
        TILED,
        &[(
            TILED,
            "end_query >= min(first_query + BLOCK_Q, item.rows)",
            "first_query < end_query",
        )],
    ),
    mutant(
        "a row's first key ignored",
        TILED,
        &[(
            TILED,
            "pair.visible & (key >= from_key) & (key < limit)",
            "pair.visible & (key < limit)",
        )],
    ),
    mutant(
        "a row's first key ignored",
        LANES,
        &[(LANES, "& (keys[j] >= from_key[r])", "")],
    ),
    mutant(
        "scores judged by rows that stay where they are",
        TILED,
        &[(
            TILED,
            "judged[(s + ROWS_JUDGED * KEY_FOURS) % (ROWS * KEY_FOURS)]",
            "judged[s]",
        )],
    ),
    mutant(
        "peaks of rows judged before lost",
        TILED,
        &[(
            TILED,
            "peak_before[(r + ROWS_JUDGED) % ROWS]",
            "peak_before[r]",
        )],
    ),
    mutant(
        "hidden keys of rows judged before lost",
        TILED,
        &[(
            TILED,
            "hidden_before[(r + ROWS_JUDGED) % ROWS]",
            "hidden_before[r]",
        )],
    ),
    mutant(
        "channels of v counted as those of q",
        TILED,
        &[(
            TILED,
            "if (channel < params.value_dim) {",
            "if (channel < params.head_dim) {",
        )],
    ),
    mutant(
        "channels of v counted as those of q",
        LANES,
        &[(
            FOURS_ANY,
            "min(channel, params.value_dim - 1u)",
            "min(channel, params.head_dim - 1u)",
        )],
    ),
    mutant(
        "the sink counted by every invocation of a row",
        TILED,
        &[(TILED, "sinks && local.x == 0u", "sinks")],
    ),
    mutant(
        "the sink kept out of the maximum",
        LANES,
        &[(
            LANES,
            "Online(select(0.0, item.sink, sinks),",
            "Online(0.0,",
        )],
    ),
];

/// Broken kernels for few queries.
static DECODE_MUTANTS: &[Mutant] = &[
    mutant(
        "heads of another group",
        DLANES,
        &[(
            SHARE,
            "share.kv_head * params.group + row % params.group",
            "share.kv_head + row % params.group * (params.heads / params.group)",
        )],
    ),
    mutant(
        "rows of another query",
        DTILED,
        &[(
            SHARE,
            "return row / params.group;",
            "return row / (params.group + 1u);",
        )],
    ),
    mutant(
        "a sink in every part",
        DLANES,
        &[(SHARE, "item.has_sink && share.part == 0u", "item.has_sink")],
    ),
    mutant(
        "a sink in every part",
        DTILED,
        &[(SHARE, "item.has_sink && share.part == 0u", "item.has_sink")],
    ),
    mutant(
        "a key counted by two parts",
        DLANES,
        &[(
            SHARE,
            "min(start + own, from_key + keys)",
            "min(start + own + 1u, from_key + keys)",
        )],
    ),
    mutant(
        "a key that no part counts",
        DTILED,
        &[(
            SHARE,
            "return vec2<u32>(start, ",
            "return vec2<u32>(start + min(share.part, 1u), ",
        )],
    ),
    mutant(
        "the tail of the keys dropped",
        DLANES,
        &[(SHARE, "(keys + block - 1u) / block", "keys / block")],
    ),
    mutant(
        "the tail of the keys dropped",
        DTILED,
        &[(SHARE, "(keys + block - 1u) / block", "keys / block")],
    ),
    mutant(
        "parts written over each other",
        DLANES,
        &[(DLANES, "share.part * params.out_part_stride", "0u")],
    ),
    mutant(
        "parts written over each other",
        DTILED,
        &[(DTILED, "share.part * params.out_part_stride", "0u")],
    ),
    mutant(
        "one log-sum-exp for all parts",
        DLANES,
        &[(STORE_LSE, "item.part * params.lse_part_stride", "0u")],
    ),
    mutant(
        "the last key seen again",
        DLANES,
        &[(
            DLANES,
            "let there = first_key + s * LANES + lane <= last_key;",
            "let there = true;",
        )],
    ),
    mutant(
        "positions ignored",
        DLANES,
        &[(DLANES, " & (key >= from_key[r]) & (key < limit[r])", "")],
    ),
    mutant(
        "hidden weights in the total",
        DLANES,
        &[(
            DLANES,
            "let added = select(weight, vec4<f32>(), hidden);",
            "let added = weight;",
        )],
    ),
    mutant(
        "hidden values reach a row",
        DLANES,
        &[(DLANES, "select(v_c, vec4<f32>(), hidden)", "v_c")],
    ),
    mutant(
        "hidden values reach a row",
        DTILED,
        &[(DTILED, "if (!(weight < 0.0)) {", "if (true) {")],
    ),
    mutant(
        "sums that do not shrink",
        DLANES,
        &[(
            DLANES,
            "sum[r * COLUMNS + c] * shrink",
            "sum[r * COLUMNS + c]",
        )],
    ),
    mutant(
        "sums that do not shrink",
        DTILED,
        &[(
            DTILED,
            "sum[r * COLUMNS + c] * shrink",
            "sum[r * COLUMNS + c]",
        )],
    ),
    mutant(
        "totals that do not shrink",
        DLANES,
        &[(DLANES, "fma(total[r], shrink, ", "fma(total[r], 1.0, ")],
    ),
    mutant(
        "totals that do not shrink",
        DTILED,
        &[(DTILED, "total[r] = total[r] * shrink;", "")],
    ),
    mutant(
        "pages of item 0",
        DLANES,
        &[(PAGES, "item.batch * params.block_table_stride", "0u")],
    ),
    mutant(
        "the first row of every page",
        DTILED,
        &[(PAGES, " + key % size", "")],
    ),
    mutant(
        "values in order where they lie in pages",
        DLANES,
        &[
            (DLANES, "if (!PAGED) {", "if (true) {"),
            (DLANES, "place[s] = key_row(first_item, ", "place[s] = ("),
        ],
    ),
    mutant(
        "parts written over each other",
        DROWS,
        &[(DROWS, "share.part * params.out_part_stride", "0u")],
    ),
    mutant(
        "the last key seen again",
        DROWS,
        &[(
            DROWS,
            "let there = first_key + lane <= last_key;",
            "let there = true;",
        )],
    ),
    mutant(
        "the tail of the keys dropped",
        DROWS,
        &[(
            DROWS,
            "first_key < own_keys.y; first_key += LANES",
            "first_key + LANES <= own_keys.y; first_key += LANES",
        )],
    ),
    mutant(
        "hidden weights in the total",
        DROWS,
        &[(
            DROWS,
            "let counts = visible & !weighs_nothing(pair.score);",
            "let counts = !weighs_nothing(pair.score);",
        )],
    ),
    mutant(
        "hidden values reach a row",
        DROWS,
        &[(DROWS, "select(vec4<f32>(), v_d, visible)", "v_d")],
    ),
    mutant(
        "sums that do not shrink",
        DROWS,
        &[(
            DROWS,
            "sum[i % LINES * 4u + i / LINES] * shrink",
            "sum[i % LINES * 4u + i / LINES]",
        )],
    ),
    mutant(
        "totals that do not shrink",
        DROWS,
        &[(
            DROWS,
            "fma(total, shrink, weight)",
            "fma(total, 1.0, weight)",
        )],
    ),
    mutant(
        "a sink in every lane",
        DROWS,
        &[(DROWS, " && lane == 0u;", ";")],
    ),
    mutant(
        "lanes put together by nothing",
        DROWS,
        &[(DROWS, "exp(select(peaks[i] - top, 0.0, none))", "1.0")],
    ),
    mutant(
        "a floor of 0 under the highest of all lanes",
        DROWS,
        &[(DROWS, "(!some | (peaks[i] > top))", "(peaks[i] > top)")],
    ),
    mutant(
        "a lane without keys is the highest",
        DROWS,
        &[(DROWS, "!(totals[i] == 0.0) & (!some", "(!some")],
    ),
    mutant(
        "the values of a key that lies elsewhere",
        DROWS,
        &[(
            DROWS,
            "v_base + place * params.v_token_stride",
            "v_base + key * params.v_token_stride",
        )],
    ),
];

/// Broken fragments: each breaks every attention kernel that it is linked into.
static RULE_MUTANTS: &[(&str, &[Edit])] = &[
    (
        "a key too few under causality",
        &[(ITEM, "params.window_right + 1", "params.window_right")],
    ),
    (
        "a key too many under causality",
        &[(ITEM, "params.window_right + 1", "params.window_right + 2")],
    ),
    (
        "right window and causality ignored",
        &[(ITEM, "params.window_right >= 0", "false")],
    ),
    (
        "alignment swapped",
        &[(
            ITEM,
            "params.bottom_right != 0u",
            "params.bottom_right == 0u",
        )],
    ),
    (
        "alignment ignored",
        &[(ITEM, "params.bottom_right != 0u", "false")],
    ),
    (
        "alignment by the padded lengths",
        &[(
            ITEM,
            "i32(item.kv_len) - i32(item.q_len)",
            "i32(params.kv_len) - i32(params.q_len)",
        )],
    ),
    (
        "left window a key too few",
        &[(
            ITEM,
            "own - params.window_left",
            "own - params.window_left + 1",
        )],
    ),
    (
        "left window a key too many",
        &[(
            ITEM,
            "own - params.window_left",
            "own - params.window_left - 1",
        )],
    ),
    (
        "left window ignored",
        &[(ITEM, "params.window_left >= 0", "false")],
    ),
    (
        "key lengths ignored",
        &[(ITEM, "params.kv_lens_at != NONE", "false")],
    ),
    // microsoft/onnxruntime#29247
    (
        "key length of item 0",
        &[(ITEM, "params.kv_lens_at + batch", "params.kv_lens_at")],
    ),
    (
        "query lengths ignored",
        &[(ITEM, "params.q_lens_at != NONE", "false")],
    ),
    (
        "query length of item 0",
        &[(ITEM, "params.q_lens_at + batch", "params.q_lens_at")],
    ),
    (
        "sink ignored",
        &[(ITEM, "params.sinks_at != NONE", "false")],
    ),
    (
        "sink of head 0",
        &[(ITEM, "params.sinks_at + head", "params.sinks_at")],
    ),
    (
        "slope of head 0",
        &[(
            ITEM,
            "params.slopes_batch_stride + head]",
            "params.slopes_batch_stride]",
        )],
    ),
    (
        "slopes of item 0",
        &[(ITEM, "batch * params.slopes_batch_stride", "0u")],
    ),
    (
        "packed queries from the start",
        &[(
            ITEM,
            "min(tables[params.cu_seqlens_q_at + batch], params.q_total)",
            "0u",
        )],
    ),
    (
        "packed keys from the start",
        &[(
            ITEM,
            "min(tables[params.cu_seqlens_k_at + batch], params.kv_total)",
            "0u",
        )],
    ),
    (
        "packed keys without an end",
        &[(
            ITEM,
            "min(item.keys, max(k_end, k_start) - k_start)",
            "item.keys",
        )],
    ),
    (
        "packed queries without an end",
        &[(
            ITEM,
            "min(item.rows, max(q_end, q_start) - q_start)",
            "item.rows",
        )],
    ),
    (
        "begin of the keys ignored",
        &[(ITEM, "max(params.key_begin, ", "max(0u, ")],
    ),
    (
        "end of the keys ignored",
        &[(ITEM, "min(item.kv_len, params.key_end)", "item.kv_len")],
    ),
    (
        "mask ignored",
        &[(MASK, "& 0xffu) != 0u", "& 0xffu) < 256u")],
    ),
    (
        "mask polarity flipped",
        &[(MASK, "& 0xffu) != 0u", "& 0xffu) == 0u")],
    ),
    ("mask read by words", &[(MASK, "byte % 4u", "0u")]),
    (
        "offset of the mask ignored",
        &[(MASK, "params.mask_offset", "0u")],
    ),
    (
        "mask of item 0",
        &[(MASK, "item.batch * params.mask_batch_stride", "0u")],
    ),
    (
        "mask of head 0",
        &[(MASK, "item.head * params.mask_head_stride", "0u")],
    ),
    (
        "mask of query 0",
        &[(MASK, "query * params.mask_query_stride", "0u")],
    ),
    (
        "mask of key 0",
        &[(MASK, "key * params.mask_key_stride", "0u")],
    ),
    ("bias ignored", &[(RULES, "sloped + added", "sloped")]),
    (
        "offset of the bias ignored",
        &[(BIAS, "params.bias_offset", "0u")],
    ),
    (
        "bias of item 0",
        &[(BIAS, "item.batch * params.bias_batch_stride", "0u")],
    ),
    (
        "bias of head 0",
        &[(BIAS, "item.head * params.bias_head_stride", "0u")],
    ),
    (
        "bias of query 0",
        &[(BIAS, "query * params.bias_query_stride", "0u")],
    ),
    (
        "bias of key 0",
        &[(BIAS, "key * params.bias_key_stride", "0u")],
    ),
    (
        "bias of -infinity added to NaN",
        &[(RULES, "Pair(!weighs_nothing(added)", "Pair(true")],
    ),
    (
        "slope's sign",
        &[(RULES, "- item.slope * f32", "+ item.slope * f32")],
    ),
    (
        "distance from the diagonal",
        &[(
            RULES,
            "i32(query) + item.own - i32(key)",
            "i32(query) - i32(key)",
        )],
    ),
    (
        "distance of keys before only",
        &[(RULES, "= abs(i32(query)", "= max(0, i32(query)")],
    ),
    (
        "softcap ignored",
        &[(RULES, "params.softcap == 0.0", "true")],
    ),
    (
        "softcap after the bias",
        &[
            (
                RULES,
                "let sloped = capped(product)",
                "let sloped = product",
            ),
            (
                RULES,
                "added), sloped + added)",
                "added), capped(sloped + added))",
            ),
        ],
    ),
    (
        "softcap of positive scores only",
        &[(RULES, "select(ratio, -ratio, x < 0.0)", "ratio")],
    ),
    (
        "own mask ignored",
        &[(
            PAIR,
            "\n        & may_attend(item.batch, item.head, query, key)",
            "",
        )],
    ),
    (
        "own score ignored",
        &[(PAIR, "Pair(visible, ruled)", "Pair(visible, scored.score)")],
    ),
    ("own score of -infinity seen", &[(PAIR, " & !hidden", "")]),
    (
        "own rule by KV head",
        &[(
            PAIR,
            "score(scored.score, item.batch, item.head,",
            "score(scored.score, item.batch, item.head / params.group,",
        )],
    ),
    (
        "wrong half of a word",
        &[(ELEMENTS, "(index & 1u) * 16u", "0u")],
    ),
    (
        "f16 cut off instead of rounded",
        &[(ELEMENTS, "size + 0xfffu + ((size >> 13u) & 1u)", "size")],
    ),
    (
        "bf16 cut off instead of rounded",
        &[(ELEMENTS, "(bits + 0x7fffu + ((bits >> 16u) & 1u))", "bits")],
    ),
    (
        "bf16 read as f16",
        &[(
            ELEMENTS,
            "select(f16_value_bits(half), half << 16u, element == BF16)",
            "f16_value_bits(half)",
        )],
    ),
    (
        "the other half of a last word overwritten",
        &[(STORE, "out[index >> 1u] & 0xffff0000u", "0u")],
    ),
    (
        "log-sum-exp in base 2",
        &[(
            STORE_LSE,
            "select(highest + log(total)",
            "select(highest + log2(total)",
        )],
    ),
    (
        "log-sum-exp of an empty row",
        &[(
            STORE_LSE,
            "select(0xff800000u, bitcast<u32>(value), any)",
            "select(0u, bitcast<u32>(value), any)",
        )],
    ),
];

/// The same in each kernel's own text.
static KERNEL_RULE_MUTANTS: &[(&str, &[Edit])] = &[
    // onnx/onnx#7274
    (
        "KV head by modulo",
        &[
            (
                TILED,
                "head / params.group",
                "head % (params.heads / params.group)",
            ),
            (
                LANES,
                "head / params.group",
                "head % (params.heads / params.group)",
            ),
        ],
    ),
    // AI-Hypercomputer/maxtext#4442, microsoft/onnxruntime#24309
    (
        "KV head as if each query head had its own",
        &[
            (TILED, "head / params.group", "head"),
            (LANES, "head / params.group", "head"),
        ],
    ),
    (
        "rows past a packed sequence stored",
        &[
            (TILED, STORED, "if (row < params.q_len)"),
            (
                LANES,
                "if (query < block.rows)",
                "if (query < params.q_len)",
            ),
        ],
    ),
    (
        "packed output from the start",
        &[
            (
                TILED,
                "(item.q_start + row) * params.out_token_stride",
                "row * params.out_token_stride",
            ),
            (LANES, "+ item.q_start * params.out_token_stride", ""),
        ],
    ),
    (
        "sinks ignored by the kernel",
        &[
            (TILED, "if (item.has_sink)", "if (false)"),
            (LANES, "item.has_sink", "false"),
        ],
    ),
];

/// Of attention_tiled where it has the keys in parts side by side.
static PART_MUTANTS: &[Mutant] = &[
    mutant(
        "sink in every part",
        TILED,
        &[(TILED, "item.has_sink && part == 0u", "item.has_sink")],
    ),
    mutant(
        "all parts to the place of the first",
        TILED,
        &[(TILED, "part * params.out_part_stride", "0u")],
    ),
    mutant(
        "log-sum-exp of all parts to the place of the first",
        TILED,
        &[(TILED, "item.part = part;", "item.part = 0u;")],
    ),
    mutant(
        "the last key of a part left out",
        TILED,
        &[(
            TILED,
            "keys_from + part * own_blocks * BLOCK_K",
            "keys_from + part * (own_blocks * BLOCK_K + 1u)",
        )],
    ),
    mutant(
        "every part has all keys",
        TILED,
        &[(
            TILED,
            "keys_from + part * own_blocks * BLOCK_K",
            "keys_from",
        )],
    ),
];

const WEIGHTS: &str = "attention_weights";
const MERGE: &str = "merge";
const COPY: &str = "copy";

static OTHER_MUTANTS: &[Mutant] = &[
    mutant(
        "first key ignored",
        WEIGHTS,
        &[(WEIGHTS, "key >= first && key < limit", "key < limit")],
    ),
    mutant(
        "scale ignored",
        WEIGHTS,
        &[(WEIGHTS, " * params.scale", "")],
    ),
    mutant(
        "sink ignored",
        WEIGHTS,
        &[(
            WEIGHTS,
            "select(0.0, exp(item.sink - highest), item.has_sink)",
            "0.0",
        )],
    ),
    mutant(
        "no maximum subtracted",
        WEIGHTS,
        &[
            (
                WEIGHTS,
                "exp(bitcast<f32>(bits) - highest)",
                "exp(bitcast<f32>(bits))",
            ),
            (WEIGHTS, "exp(item.sink - highest)", "exp(item.sink)"),
        ],
    ),
    mutant(
        "KV head by modulo",
        WEIGHTS,
        &[(
            WEIGHTS,
            "head / params.group",
            "head % (params.heads / params.group)",
        )],
    ),
    mutant(
        "total of one invocation only",
        WEIGHTS,
        &[(
            WEIGHTS,
            "row_total = row_total + totals[i];",
            "row_total = total;",
        )],
    ),
    mutant(
        "peak of one invocation only",
        WEIGHTS,
        &[(
            WEIGHTS,
            "i < THREADS; i++) {\n        if (peaks_seen[i] != 0u",
            "i < 1u; i++) {\n        if (peaks_seen[i] != 0u",
        )],
    ),
    mutant(
        "rows that see no key divided by 0",
        WEIGHTS,
        &[(
            WEIGHTS,
            "select(0.0, bitcast<f32>(weights[at]) / row_total, seen)",
            "(bitcast<f32>(weights[at]) / row_total)",
        )],
    ),
    mutant(
        "stages swapped",
        WEIGHTS,
        &[(
            WEIGHTS,
            "params.stage == CAPPED",
            "params.stage == MASKED_SCORES",
        )],
    ),
    mutant(
        "log-sum-exp of the parts ignored",
        MERGE,
        &[(
            MERGE,
            "exp(part_lse[lse_at] - highest) * part_total(lse_at)",
            "1.0",
        )],
    ),
    mutant(
        "no maximum subtracted",
        MERGE,
        &[
            (MERGE, "exp(part_lse[at] - highest)", "exp(part_lse[at])"),
            (
                MERGE,
                "exp(part_lse[lse_at] - highest)",
                "exp(part_lse[lse_at])",
            ),
        ],
    ),
    mutant(
        "empty parts weighed",
        MERGE,
        &[(MERGE, "if (!weighs_nothing(part_lse[lse_at]))", "if (true)")],
    ),
    mutant(
        "head of the parts ignored",
        MERGE,
        &[(MERGE, "head * params.parts_head_stride", "0u")],
    ),
    mutant(
        "batch of the log-sum-exp ignored",
        MERGE,
        &[(MERGE, "batch * params.part_lse_batch_stride", "0u")],
    ),
    mutant(
        "second channel of a pair lost",
        MERGE,
        &[(MERGE, "parts[at + u32(both)]", "parts[at]")],
    ),
    mutant(
        "one pair of channels an invocation",
        MERGE,
        &[(MERGE, "channel += 128u", "channel += 1000u")],
    ),
    mutant(
        "axis 2 of the source ignored",
        COPY,
        &[(COPY, "i2 * params.from_stride_2", "0u")],
    ),
    mutant(
        "axis 1 of the target ignored",
        COPY,
        &[(COPY, "i1 * params.to_stride_1", "0u")],
    ),
    mutant(
        "offset of the source ignored",
        COPY,
        &[(COPY, "params.from_offset", "0u")],
    ),
    mutant(
        "source read as if contiguous",
        COPY,
        &[(COPY, "select(0u, params.from_stride_4, both)", "u32(both)")],
    ),
    mutant(
        "type of the source ignored",
        COPY,
        &[(
            COPY,
            "value_of(source[word_of(index, params.from_type)], index, params.from_type)",
            "bitcast<f32>(source[index])",
        )],
    ),
    mutant(
        "an element past the last one",
        COPY,
        &[(
            COPY,
            "let both = i4 + 1u < params.size_4;",
            "let both = true;",
        )],
    ),
];

const LTILED: &str = "linear_tiled";
const LFOURS: &str = "shared/linear_fours";
const LFOURS_ANY: &str = "shared/linear_fours_any";
const LEIGHTS: &str = "shared/linear_eights";
const LSTEPS: &str = "shared/linear_steps";
const LLANES: &str = "linear_lanes";
const LFEW: &str = "linear_few";
const ROWS: &str = "shared/linear_params";
const BIAS_PAIR: &str = "shared/bias_pair";
const STORE_ROWS: &str = "rules/rows";

static LINEAR_MUTANTS: &[Mutant] = &[
    mutant(
        "bias ignored",
        LTILED,
        &[(BIAS_PAIR, "params.has_bias != 0u", "false")],
    ),
    mutant(
        "bias ignored",
        LLANES,
        &[(BIAS_PAIR, "params.has_bias != 0u", "false")],
    ),
    mutant(
        "offset of the bias ignored",
        LTILED,
        &[(BIAS_PAIR, "params.bias_offset + column]", "column]")],
    ),
    mutant(
        "offset of the bias ignored",
        LLANES,
        &[(BIAS_PAIR, "params.bias_offset + column]", "column]")],
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
        &[(
            LLANES,
            "first < params.d_in; first += LANES",
            "first + LANES <= params.d_in; first += LANES",
        )],
    ),
    mutant(
        "channels past the end counted",
        LTILED,
        &[(LTILED, "there[i])", "true)")],
    ),
    mutant(
        "four channels at once: rows begin elsewhere",
        LTILED,
        &[(
            LFOURS,
            "weight[(start + min(channel, params.d_in - 4u)) / 4u]",
            "weight[start + min(channel, params.d_in - 4u)]",
        )],
    ),
    mutant(
        "channels past the end counted",
        LLANES,
        &[(LSTEPS, "select(vec4<f32>(), four, there)", "four")],
    ),
    mutant(
        "broadcasts of one lane",
        LLANES,
        &[(SPREAD_WEIGHTS, "subgroupBroadcast(mine[f], c)", "mine[f]")],
    ),
    mutant(
        "eight channels at once: rows begin elsewhere",
        LLANES,
        &[(
            LEIGHTS,
            "weight[(start + first) / 8u]",
            "weight[start / 8u + first]",
        )],
    ),
    mutant(
        "half of 64 bits of another four",
        LLANES,
        &[(LEIGHTS, "u32(pairs.x >> 32u)", "u32(pairs.y >> 32u)")],
    ),
    mutant(
        "the last columns of a vector's width missing",
        LLANES,
        &[(LLANES, "c += 4u) {", "c += 8u) {")],
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
            "if (row < params.rows && column < params.d_out)",
            "if (row + 1u < params.rows && column < params.d_out)",
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
        &[
            (
                LLANES,
                "store_row(min(row, params.rows - 1u))",
                "store_row(row)",
            ),
            (
                LLANES,
                "if (row < params.rows && column < params.d_out)",
                "if (row <= params.rows && column < params.d_out)",
            ),
        ],
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
            "if (row < params.rows && column < params.d_out)",
            "if (row < params.rows && column + 1u < params.d_out)",
        )],
    ),
    mutant(
        "column past the end stored",
        LTILED,
        &[(
            LTILED,
            "let both = column + 1u < params.d_out;",
            "let both = true;",
        )],
    ),
    mutant(
        "column past the end stored",
        LLANES,
        &[(
            LLANES,
            "let second = column + 1u < params.d_out;",
            "let second = true;",
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
        &[(LFOURS_ANY, " * params.x_channel_stride", "")],
    ),
    mutant(
        "channel stride of x ignored",
        LLANES,
        &[(
            LFOURS_ANY,
            "min(channel, params.d_in - 1u) * params.x_channel_stride",
            "min(channel, params.d_in - 1u)",
        )],
    ),
    mutant(
        "channel stride of the weight ignored",
        LTILED,
        &[(LFOURS_ANY, " * params.weight_in_stride", "")],
    ),
    mutant(
        "channel stride of the weight ignored",
        LLANES,
        &[(LFOURS_ANY, " * params.weight_in_stride", "")],
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
        &[(STORE_ROWS, "column * params.y_channel_stride", "column")],
    ),
    mutant(
        "channel stride of y ignored",
        LLANES,
        &[(STORE_ROWS, "column * params.y_channel_stride", "column")],
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
        &[(STORE_ROWS, "params.y_offset + ", "")],
    ),
    mutant(
        "offset of y ignored",
        LLANES,
        &[(STORE_ROWS, "params.y_offset + ", "")],
    ),
    mutant(
        "offset of the weight ignored",
        LTILED,
        &[(LTILED, "params.weight_offset + ", "")],
    ),
    mutant(
        "offset of the weight ignored",
        LLANES,
        &[(LLANES, "params.weight_offset + ", "")],
    ),
    mutant(
        "stride of a pair's second column ignored",
        LTILED,
        &[(STORE_ROWS, "at + params.y_channel_stride", "at + 1u")],
    ),
    mutant(
        "bias of a pair's first column for both",
        LLANES,
        &[(BIAS_PAIR, "column + 1u]", "column]")],
    ),
    mutant(
        "columns of a pair exchanged",
        LTILED,
        &[(
            LTILED,
            "vec2<f32>(four[c % 4u], four[c % 4u + 1u])",
            "vec2<f32>(four[c % 4u + 1u], four[c % 4u])",
        )],
    ),
    mutant(
        "weights written and read in different places",
        LTILED,
        &[(LTILED, "place(local.x, channel)", "local.x")],
    ),
    mutant(
        "the first tiles read again",
        LTILED,
        &[(
            LTILED,
            "start[m], first + DEPTH + channel)",
            "start[m], channel)",
        )],
    ),
    mutant(
        "bias ignored",
        LFEW,
        &[(BIAS_PAIR, "params.has_bias != 0u", "false")],
    ),
    mutant(
        "bias added by every lane",
        LFEW,
        &[(
            LFEW,
            "total += vec2<f32>(",
            "total += bias_pair(column, column + 1u < params.d_out) + vec2<f32>(",
        )],
    ),
    mutant(
        "dropped last channel",
        LFEW,
        &[(
            LFEW,
            "i < params.d_in; i += LANES",
            "i + 1u < params.d_in; i += LANES",
        )],
    ),
    mutant(
        "dropped tail of channels",
        LFEW,
        &[(
            LFEW,
            "i < params.d_in; i += LANES",
            "i < params.d_in / 8u * 8u; i += LANES",
        )],
    ),
    mutant(
        "channels past the end counted",
        LFEW,
        &[(
            LFEW,
            "i < params.d_in; i += LANES",
            "i < (params.d_in + 3u) / 4u * 4u; i += LANES",
        )],
    ),
    mutant(
        "first lane's sum dropped",
        LFEW,
        &[(LFEW, "var l = 0u; l < LANES", "var l = 1u; l < LANES")],
    ),
    mutant(
        "rows and columns of the tile exchanged",
        LFEW,
        &[
            (LFEW, "2u * pair / COLUMNS", "2u * pair % ROWS"),
            (LFEW, "2u * pair % COLUMNS", "2u * pair / ROWS"),
        ],
    ),
    mutant(
        "sums of two outputs in one place",
        LFEW,
        &[(
            LFEW,
            "output * LANES + (lane",
            "output / 2u * LANES + (lane",
        )],
    ),
    mutant(
        "last row not stored",
        LFEW,
        &[(LFEW, "row < params.rows &&", "row + 1u < params.rows &&")],
    ),
    mutant(
        "row past the end stored",
        LFEW,
        &[(LFEW, "row < params.rows &&", "row <= params.rows &&")],
    ),
    mutant(
        "last column not stored",
        LFEW,
        &[(
            LFEW,
            "&& column < params.d_out",
            "&& column + 1u < params.d_out",
        )],
    ),
    mutant(
        "column past the end stored",
        LFEW,
        &[(
            LFEW,
            "let both = column + 1u < params.d_out;",
            "let both = true;",
        )],
    ),
    mutant(
        "channel stride of x ignored",
        LFEW,
        &[(LFEW, "i * params.x_channel_stride", "i")],
    ),
    mutant(
        "channel stride of the weight ignored",
        LFEW,
        &[(LFEW, "i * params.weight_in_stride", "i")],
    ),
    mutant(
        "row stride of the weight ignored",
        LFEW,
        &[(LFEW, "* params.weight_out_stride", "* params.d_in")],
    ),
    mutant(
        "offset of x ignored",
        LFEW,
        &[(LFEW, "params.x_offset + ", "")],
    ),
    mutant(
        "offset of the weight ignored",
        LFEW,
        &[(LFEW, "params.weight_offset\n            + ", "")],
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
        } else if !kernel.fragments.iter().any(|f| f.name == edit.0) {
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
        splits: None,
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
            kv_len: 75,
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
        // Channels that fill no compiled size, by fours and by eights.
        AttentionCase::new(1, 2, 9, 11, 12),
        AttentionCase::new(1, 2, 9, 11, 24),
        // More than one chunk of channels, and values in more than one part.
        AttentionCase {
            seed: 9,
            ..AttentionCase::new(1, 1, 9, 70, 72)
        },
    ];
    cases.extend(slower.iter().map(AttentionCase::prepare));
    cases
}

/// Few cases in which every rule decides something.
fn rule_cases() -> Vec<PreparedAttention> {
    let problem = |q_len, kv_len| AttentionProblem {
        kv_heads: 2,
        kv_len,
        value_dim: 3,
        ..AttentionProblem::new(3, 4, q_len, 5)
    };
    let with = |problem: AttentionProblem, layout, rules: AttentionRules| {
        let problem = AttentionProblem { rules, ..problem };
        let mut random = Random::new(7);
        AttentionData {
            layout,
            ..random_operands(problem, &mut random)
        }
    };
    let mut random = Random::new(8);
    let mut cases = Vec::new();
    // Windows, lengths and sinks; the second item has more queries than keys.
    let windows = with(
        problem(11, 17),
        Layout::Contiguous,
        AttentionRules {
            alignment: Some(TopLeft),
            window_left: Some(3),
            window_right: Some(2),
            ..Default::default()
        },
    );
    cases.push(
        windows
            .with_kv_lens(&[17, 5, 9])
            .with_q_lens(&[11, 7, 4])
            .with_sinks(vec![0.5, -1.0, 2.0, f32::NEG_INFINITY]),
    );
    let causal = with(
        // Blocks of 64 keys that the first query sees whole, and later ones do not.
        problem(9, 100),
        Layout::HeadMajor,
        AttentionRules {
            window_left: Some(80),
            ..AttentionRules::causal(BottomRight)
        },
    );
    cases.push(
        causal
            .with_kv_lens(&[100, 12, 7])
            .with_sinks(vec![9.0, 1.0, 0.0, -3.0]),
    );
    // Blocks of 64 keys that every query sees whole, and rows past an item's queries, which see none.
    let short = with(
        problem(9, 70),
        Layout::Contiguous,
        AttentionRules::default(),
    );
    cases.push(short.with_q_lens(&[9, 5, 0]));
    // Wider values than keys.
    let wide = AttentionProblem {
        value_dim: 7,
        ..problem(9, 13)
    };
    cases.push(with(wide, Layout::Contiguous, AttentionRules::default()));
    // A part of the keys.
    cases.push(with(
        AttentionProblem {
            keys: Some(3..11),
            ..problem(9, 13)
        },
        Layout::Padded,
        AttentionRules::causal(BottomRight),
    ));
    // Every score rule, over all axes, before and behind the own key.
    let scored = with(
        problem(9, 13),
        Layout::Padded,
        AttentionRules {
            softcap: Some(1.5),
            alignment: Some(BottomRight),
            ..Default::default()
        },
    );
    cases.push(
        scored
            .with_bias([3, 4, 9, 13], random.normals(3 * 4 * 9 * 13))
            .with_slopes((0..12).map(|at| 0.1 + 0.05 * at as f32).collect()),
    );
    // A mask of all axes, and one of NaN keys that a bias hides.
    let masked = with(problem(9, 13), Layout::Offset, AttentionRules::default());
    cases.push(masked.with_mask([3, 4, 9, 13], random.bools(3 * 4 * 9 * 13)));
    let mut hidden = with(
        problem(9, 13),
        Layout::Contiguous,
        AttentionRules::default(),
    );
    let mut bias = vec![0.25f32; 13];
    for (key, value) in bias.iter_mut().enumerate().filter(|(key, _)| key % 3 == 1) {
        *value = f32::NEG_INFINITY;
        for item in 0..3 {
            hidden.k[(item * 13 + key) * 10..][..10].fill(f32::NAN);
            hidden.v[(item * 13 + key) * 6..][..6].fill(f32::NAN);
        }
    }
    cases.push(hidden.with_bias([1, 1, 1, 13], bias));
    // Packed sequences, one without queries and one without keys.
    let mut packed = with(
        AttentionProblem {
            packed: true,
            batch: 4,
            ..problem(9, 12)
        },
        // Rows past the last sequence would be those of the first, of the next head.
        Layout::HeadMajor,
        AttentionRules::causal(BottomRight),
    );
    packed.cu_seqlens = Some([vec![0, 5, 5, 14, 17], vec![0, 7, 10, 22, 22]]);
    packed.q = random.normals(17 * 20);
    packed.k = random.normals(22 * 10);
    packed.v = random.normals(22 * 6);
    cases.push(packed);
    // A rule of the caller's own, which hides NaN by its score.
    let mut own = with(
        problem(9, 13),
        Layout::Contiguous,
        AttentionRules::default(),
    );
    for token in (0..3 * 13).filter(|token| token % 13 % 5 == 4) {
        own.v[token * 6..][..6].fill(f32::NAN);
    }
    cases.push(own.with_rule(OWN_RULE, vec![0.5, -0.5, 1.0, 0.0]));
    // Smaller types, beside each other in every way.
    for element_type in [ElementType::F16, ElementType::BF16] {
        for layout in [Layout::Offset, Layout::Padded] {
            let typed = problem(9, 13).stored_as(element_type);
            cases.push(with(typed, layout, AttentionRules::default()));
        }
        // Heads that are read by eights.
        let typed = AttentionProblem::new(1, 2, 9, 16).stored_as(element_type);
        cases.push(with(typed, Layout::Contiguous, AttentionRules::default()));
    }
    cases.into_iter().map(AttentionData::prepare).collect()
}

/// Hides by parity, weighs by head, and makes one key in five -infinity.
const OWN_RULE: OwnRule = OwnRule {
    wgsl: "
fn may_attend(batch: u32, head: u32, query: u32, key: u32) -> bool {
    return (query + key + batch) % 2u == 0u || key < 2u;
}
fn score(score: f32, batch: u32, head: u32, query: u32, key: u32) -> f32 {
    if (key % 5u == 4u) {
        return bitcast<f32>(0xff800000u | (query & 0u));
    }
    return score * 0.5 + rule_data(head) * f32(key % 3u);
}
",
    may_attend: |[batch, _, query, key], _| (query + key + batch).is_multiple_of(2) || key < 2,
    score: |score, [_, head, _, key], data| {
        if key % 5 == 4 {
            return f64::NEG_INFINITY;
        }
        score * 0.5 + f64::from(data[head]) * (key % 3) as f64
    },
};

fn linear_cases() -> Vec<PreparedLinear> {
    // Small tiles, then large ones; and four channels at once.
    [(2, 19), (3, 67)]
        .into_iter()
        .flat_map(|(batch, tokens)| {
            LINEAR_LAYOUTS[..5].iter().map(move |&layout| LinearCase {
                layout,
                ..LinearCase::new(batch, tokens, 37, 45)
            })
        })
        .chain([LinearCase::new(2, 19, 44, 45)])
        // Eight at once where there are integers of 64 bits.
        .chain([LinearCase::new(2, 19, 40, 45)])
        .map(|case| case.prepare())
        .collect()
}

/// Whether a case fails. A broken kernel that does not compile would fail for the wrong reason: that is an error.
fn rejected_by_attention(
    gpu: &Gpu,
    cases: &[PreparedAttention],
    subject: &Subject,
) -> Result<bool, String> {
    for case in cases.iter().filter(|c| subject.takes(gpu, &c.data.problem)) {
        subject.attention(gpu, &case.data.problem)?;
        if case.check(gpu, subject).is_err() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// [`rejected_by_attention`], first by the case that rejected the mutant before: the next one is broken in a similar way,
/// and each case takes pipelines of its own.
fn rejected_soon(
    gpu: &Gpu,
    cases: &[PreparedAttention],
    subject: &Subject,
    likely: &Cell<usize>,
) -> Result<bool, String> {
    for number in [likely.get()].into_iter().chain(0..cases.len()) {
        if rejected_by_attention(gpu, &cases[number..number + 1], subject)? {
            likely.set(number);
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
    for subject in attention_kernels() {
        let cases = attention_cases();
        for case in cases
            .iter()
            .filter(|c| subject.takes(&gpu, &c.data.problem))
        {
            let what = format!("{subject} {:?}", case.data.problem);
            failures.note(what, case.check(&gpu, &subject));
        }
    }
    for subject in attention_kernels() {
        let cases = rule_cases();
        for case in cases
            .iter()
            .filter(|c| subject.takes(&gpu, &c.data.problem))
        {
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

/// Few queries over keys in three parts: of groups, lengths, sinks, hidden NaN, rising scores and pages.
fn decode_cases() -> Vec<PreparedAttention> {
    let mut random = Random::new(12);
    let random = &mut random;
    let problem = |q_len, kv_len| AttentionProblem {
        batch: 2,
        kv_heads: 2,
        kv_len,
        rules: AttentionRules::causal(BottomRight),
        ..AttentionProblem::new(2, 4, q_len, 8)
    };
    let mut cases = Vec::new();
    let sinks = random_operands(problem(2, 200), random);
    cases.push(sinks.with_sinks(vec![1.0, 0.5, -1.0, 2.0]));
    let mut paged = random_operands(problem(1, 200), random);
    paged.problem.page_size = Some(7);
    cases.push(paged.with_kv_lens(&[200, 150]));
    let mut masked = random_operands(problem(1, 150), random);
    for token in (0..300).filter(|token| token % 150 % 3 == 1) {
        masked.k[token * 16..][..16].fill(f32::NAN);
        masked.v[token * 16..][..16].fill(f32::NAN);
    }
    cases.push(masked.masked(|_, key| key % 3 != 1));
    // Several blocks of keys that all weigh, and queries and values of more vectors than one, of 4 lanes too.
    let wide = AttentionProblem {
        value_dim: 24,
        kv_len: 400,
        ..AttentionProblem::new(1, 1, 1, 20)
    };
    cases.push(random_operands(wide, random));
    // Scores whose exponentials overflow beside any highest but their own.
    let rising = AttentionProblem {
        value_dim: 24,
        kv_len: 400,
        rules: AttentionRules {
            scale: Some(1.0),
            ..Default::default()
        },
        ..AttentionProblem::new(1, 1, 1, 1)
    };
    let score = |_, t, _, _| t as f32 * 2.0;
    cases.push(AttentionData::new(
        rising,
        |_, _, _, _| 1.0,
        score,
        |_, t, _, d| (t * 3 + d) as f32,
    ));
    // Fewer keys than lanes, whose scores all are far below 0.
    let low = AttentionProblem {
        kv_len: 5,
        rules: AttentionRules {
            scale: Some(1.0),
            ..Default::default()
        },
        ..AttentionProblem::new(1, 1, 1, 1)
    };
    cases.push(AttentionData::new(
        low,
        |_, _, _, _| 1.0,
        |_, t, _, _| -300.0 - t as f32,
        |_, t, _, d| (t * 3 + d) as f32,
    ));
    cases.into_iter().map(AttentionData::prepare).collect()
}

#[test]
fn broken_decoding_is_rejected() {
    let Some(gpu) = gpu() else { return };
    let cases = decode_cases();
    let in_three = |subject: &Subject| Subject {
        splits: Some(3),
        ..subject.clone()
    };
    for subject in kernels(Operation::Decode) {
        for case in &cases {
            case.check(&gpu, &in_three(&subject)).unwrap();
        }
    }
    let likely = Cell::new(0);
    all_rejected(DECODE_MUTANTS, |subject| {
        rejected_soon(&gpu, &cases, &in_three(subject), &likely)
    });
}

#[test]
fn broken_parts_of_the_keys_are_rejected() {
    let Some(gpu) = gpu() else { return };
    let cases = decode_cases();
    let in_three = |subject: &Subject| Subject {
        splits: Some(3),
        ..subject.clone()
    };
    let tiled = kernels(Operation::Attention)
        .into_iter()
        .find(|subject| subject.kernel.name == TILED)
        .unwrap();
    for case in &cases {
        case.check(&gpu, &in_three(&tiled)).unwrap();
    }
    let likely = Cell::new(0);
    all_rejected(PART_MUTANTS, |subject| {
        rejected_soon(&gpu, &cases, &in_three(subject), &likely)
    });
}

#[test]
fn broken_attention_is_rejected() {
    let Some(gpu) = gpu() else { return };
    let cases = attention_cases();
    let likely = Cell::new(0);
    all_rejected(ATTENTION_MUTANTS, |subject| {
        rejected_soon(&gpu, &cases, subject, &likely)
    });
}

#[test]
fn broken_rules_are_rejected() {
    let Some(gpu) = gpu() else { return };
    let cases = rule_cases();
    let mut failures = Failures::default();
    // Every mutant is compiled several times. On lavapipe, the fastest here, a broken fragment is put into both kernels;
    // on the others into one of them, in turn.
    let info = gpu.adapter_info();
    let both = info.backend == wgpu::Backend::Vulkan && info.name.contains("llvmpipe");
    let likely = Cell::new(0);
    for kernel in [TILED, LANES] {
        let own = KERNEL_RULE_MUTANTS.iter().map(|(name, edits)| {
            let edits = edits.iter().filter(|(file, ..)| *file == kernel);
            (*name, edits.copied().collect())
        });
        let shared = RULE_MUTANTS.iter().enumerate();
        let shared = shared
            .filter(|(number, _)| both || (number % 2 == 0) == (kernel == TILED))
            .map(|(_, (name, edits))| (*name, edits.to_vec()));
        for (name, edits) in own.chain(shared) {
            let subject = broken(kernel, &edits);
            let result = match rejected_soon(&gpu, &cases, &subject, &likely) {
                Ok(true) => Ok(()),
                Ok(false) => Err("not rejected".to_string()),
                Err(error) => Err(error),
            };
            failures.note(format!("{kernel}: {name}"), result);
        }
    }
    let kernels = if both { 2 } else { 1 };
    failures.report(kernels * RULE_MUTANTS.len() + 2 * KERNEL_RULE_MUTANTS.len());
    all_rejected(RULED_ATTENTION_MUTANTS, |subject| {
        rejected_soon(&gpu, &cases, subject, &likely)
    });
}

/// Whether weights, merges or copies by this kernel are wrong somewhere.
fn rejected_by_others(gpu: &Gpu, kernel: &'static Kernel) -> Result<bool, String> {
    let rejected = match kernel.operation {
        Operation::Weights => weights_are_right(gpu, kernel),
        Operation::Merge => merges_are_right(gpu, kernel),
        Operation::Copy => copies_are_right(gpu, kernel),
        other => return Err(format!("no cases for {other:?}")),
    };
    match rejected {
        Ok(()) => Ok(false),
        // One that does not compile would fail for the wrong reason.
        Err(error) if error.contains("was refused") => Err(error),
        Err(_) => Ok(true),
    }
}

fn weights_are_right(gpu: &Gpu, kernel: &'static Kernel) -> Result<(), String> {
    let words = |error: wgpu_attention::Error| error.to_string();
    let mut random = Random::new(3);
    for (case, stage) in [
        WeightsStage::Weights,
        WeightsStage::Capped,
        WeightsStage::Masked,
    ]
    .into_iter()
    .cycle()
    .take(6)
    .enumerate()
    {
        let problem = AttentionProblem {
            kv_heads: 2,
            kv_len: 150,
            rules: AttentionRules {
                // Scores of some hundreds, in every second case.
                scale: (case % 2 == 0).then_some(60.0),
                softcap: (case % 2 == 1).then_some(2.0),
                window_left: Some(90),
                ..AttentionRules::causal(BottomRight)
            },
            ..AttentionProblem::new(2, 4, 20, 5)
        };
        let mut data = random_operands(problem, &mut random).with_kv_lens(&[150, 10]);
        if case < 3 {
            data = data.with_sinks(vec![0.5, 1.0, 150.0, -1.0]);
        }
        let mut plan = data
            .problem
            .plan_weights(gpu.capabilities())
            .map_err(words)?;
        plan.kernel = kernel;
        let weights = AttentionWeights::from_plan(gpu, data.problem.clone(), stage, plan);
        let weights = weights.map_err(words)?;
        let shape = [2, 4, 20, 150];
        let guarded = Guarded::new(gpu, &shape);
        let operands = data.upload(gpu);
        run(gpu, |encoder| {
            let arguments = WeightsArguments {
                q: &operands.q,
                k: &operands.k,
                weights: &guarded.tensor.view(),
                rules: operands.rules(),
            };
            weights.encode(encoder, arguments).unwrap();
        });
        let expected = data.with_inputs(|inputs| match stage {
            WeightsStage::Capped => reference::scores(inputs, reference::Stage::Capped).unwrap(),
            WeightsStage::Masked => reference::scores(inputs, reference::Stage::Masked).unwrap(),
            _ => reference::attention(inputs).unwrap().weights,
        });
        // Scores of hundreds are rounded by as much as 1e-5 of themselves, and weights by that of themselves.
        let tolerance = Tolerance::new(2e-4, 1e-3);
        compared(&guarded.read()?, &expected, &shape, tolerance)?;
    }
    Ok(())
}

fn merges_are_right(gpu: &Gpu, kernel: &'static Kernel) -> Result<(), String> {
    let words = |error: wgpu_attention::Error| error.to_string();
    let mut random = Random::new(4);
    for (lowest, value_dim) in [(0.0, 5), (300.0, 131)] {
        let [parts, batch, q_len, heads] = [3, 2, 4, 3];
        let rows = batch * heads * q_len;
        let outs = random.normals(parts * rows * value_dim);
        let mut lse: Vec<f32> = random.normals(parts * rows);
        let mut values = outs.clone();
        for (at, lse) in lse.iter_mut().enumerate() {
            *lse += lowest;
            if at % 5 == 1 {
                *lse = f32::NEG_INFINITY;
            }
        }
        // What an empty part holds must not show: (P, B, Tq, H, Dv) by (P, B, H, Tq).
        for (row, values) in values.chunks_mut(value_dim).enumerate() {
            let (part, b) = (row / rows, row / (q_len * heads) % batch);
            let (t, h) = (row / heads % q_len, row % heads);
            if lse[((part * batch + b) * heads + h) * q_len + t] == f32::NEG_INFINITY {
                values.fill(f32::NAN);
            }
        }
        let (wide, wide_lse) = (reference::widen(&values), reference::widen(&lse));
        let partials: Vec<reference::Partial> = (0..parts)
            .map(|part| reference::Partial {
                out: &wide[part * rows * value_dim..(part + 1) * rows * value_dim],
                lse: &wide_lse[part * rows..(part + 1) * rows],
            })
            .collect();
        let expected = reference::merge(&reference::MergeInputs {
            batch,
            q_len,
            heads,
            value_dim,
            parts: &partials,
        });
        let (expected, expected_lse) = expected.map_err(words)?;
        let problem = MergeProblem {
            parts,
            batch,
            heads,
            q_len,
            value_dim,
            out_type: ElementType::F32,
        };
        let mut plan = problem.plan(gpu.capabilities()).map_err(words)?;
        plan.kernel = kernel;
        let merge = Merge::from_plan(gpu, problem, plan).map_err(words)?;
        let shape = [parts, batch, q_len, heads, value_dim];
        let values = Tensor::from_slice(gpu, &shape, &values).unwrap().view();
        let lse = Tensor::from_slice(gpu, &[parts, batch, heads, q_len], &lse).unwrap();
        let out = Guarded::new(gpu, &shape[1..]);
        let out_lse = Guarded::new(gpu, &[batch, heads, q_len]);
        run(gpu, |encoder| {
            let arguments = MergeArguments {
                parts: &values,
                part_lse: &lse.view(),
                out: &out.tensor.view(),
                lse: Some(&out_lse.tensor.view()),
            };
            merge.encode(encoder, arguments).unwrap();
        });
        compared(&out.read()?, &expected, &shape[1..], Tolerance::F32)?;
        compared(&out_lse.read()?, &expected_lse, &[rows], Tolerance::F32)?;
    }
    Ok(())
}

fn copies_are_right(gpu: &Gpu, kernel: &'static Kernel) -> Result<(), String> {
    let copy = TensorCopy::from_kernel(gpu, kernel).map_err(|error| error.to_string())?;
    let values = Random::new(5).normals(2 * 3 * 4 * 5 * 7);
    let shape = [2, 3, 4, 5, 7];
    let halves: Vec<half::f16> = values.iter().map(|v| half::f16::from_f32(*v)).collect();
    let f32s = Tensor::from_slice(gpu, &shape, &values).unwrap().view();
    let f16s = Tensor::from_slice(gpu, &shape, &halves).unwrap().view();
    for view in [f32s, f16s] {
        for order in [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]] {
            let view = sliced(&permuted(&view, &order), 1, 1..3);
            let to = Guarded::new(gpu, view.shape());
            run(gpu, |encoder| {
                copy.encode(encoder, &view, &to.tensor.view()).unwrap()
            });
            let right: Vec<f32> = match view.element_type() {
                ElementType::F16 => {
                    let halves = view.read_blocking::<half::f16>().unwrap();
                    halves.iter().map(|v| v.to_f32()).collect()
                }
                _ => view.read_blocking::<f32>().unwrap(),
            };
            same_bits(&to.read()?, &right)?;
        }
    }
    Ok(())
}

#[test]
fn broken_weights_merges_and_copies_are_rejected() {
    let Some(gpu) = gpu() else { return };
    for name in [WEIGHTS, MERGE, COPY] {
        assert_eq!(
            rejected_by_others(&gpu, find(name).unwrap()),
            Ok(false),
            "{name} as it is"
        );
    }
    all_rejected(OTHER_MUTANTS, |subject| {
        rejected_by_others(&gpu, subject.kernel)
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

/// Every kernel of the table is broken in some ways, and both forms in the same, but for what only one of them has.
#[test]
fn every_kernel_has_broken_twins() {
    // What moves tokens into a cache is broken in tests/cache.rs, and what only some adapters run in tests/tiers.rs.
    let apart = ["append", "attention_matrices"];
    for kernel in KERNELS
        .iter()
        .filter(|kernel| !apart.contains(&kernel.name))
    {
        let all = [
            ATTENTION_MUTANTS,
            DECODE_MUTANTS,
            LINEAR_MUTANTS,
            OTHER_MUTANTS,
        ];
        let count = all
            .iter()
            .flat_map(|m| m.iter())
            .filter(|m| m.kernel == kernel.name)
            .count();
        assert!(count >= 6, "{}: {count}", kernel.name);
    }
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
        6,
        "the eight invocations of a row, which exchange totals here, are one vector and run in step",
    ),
    (
        DROWS,
        0,
        "the eight invocations are one vector and run in step",
    ),
    (
        DROWS,
        1,
        "the eight invocations are one vector and run in step",
    ),
];

/// Barriers that no software adapter can show to be missing, and why. (By the code that AMD's compiler makes they are
/// needed.)
static UNSEEN_BY_MASKED_LANES: &[(&str, usize, &str)] = &[(
    TILED,
    5,
    "before they leave a loop these adapters walk through it once more with no lane on, its barriers included",
)];

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
    let decoded = decode_cases();
    let mut failures = Failures::default();
    for name in [TILED, DTILED, DROWS, LTILED, LFEW, WEIGHTS] {
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
            let never = UNSEEN_BY_MASKED_LANES
                .iter()
                .find(|(kernel, n, _)| (*kernel, *n) == (name, number));
            let rejected = match subject.kernel.operation {
                Operation::Attention => rejected_by_attention(&gpu, &attention, &subject),
                Operation::Decode => rejected_by_attention(&gpu, &decoded, &subject),
                Operation::Linear | Operation::LinearFew => {
                    rejected_by_linear(&gpu, &linear, &subject)
                }
                _ => rejected_by_others(&gpu, subject.kernel),
            };
            let result = rejected.and_then(|rejected| match (rejected, unseen, lanes) {
                (true, ..) if never.is_some() => Err(format!("rejected, though {never:?}")),
                (false, ..) if never.is_some() => Ok(()),
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
    failures.report(13);
}
