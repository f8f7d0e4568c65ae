//! Cases of ONNX Runtime's own operators `MultiHeadAttention` and `GroupQueryAttention` (com.microsoft).

use super::Case;
use super::attention::{AttentionCase, Layout, Operand, Output};
use super::host::Values;
use super::kind::{Kind, unsupported};
use crate::Result;
use crate::attention::{Alignment, AttentionRules};
use crate::tensor::shape_text;

pub(super) const ORT: Kind = Kind {
    names: &["ort"],
    attributes: &[
        "B",
        "D",
        "Dv",
        "Hkv",
        "Hq",
        "L",
        "S",
        "align",
        "causal",
        "do_rotary",
        "kv_num_heads",
        "lens",
        "local_window_size",
        "mask_kind",
        "num_heads",
        "op",
        "past",
        "rotary",
        "rotary_dim",
        "rotary_interleaved",
        "scale",
        "softcap",
        "unidirectional",
        "window_left",
    ],
    inputs: &[
        "query",
        "key",
        "value",
        "bias",
        "past_key",
        "past_value",
        "seqlens_k",
        "total_sequence_length",
        "cos_cache",
        "sin_cache",
        "head_sink",
        "attention_bias",
        "key_padding_mask",
    ],
    run: |case, selection, engine| read(case)?.run(selection, engine),
};

fn read(case: &Case) -> Result<AttentionCase> {
    let grouped = match case.attr_str("op")? {
        "com.microsoft.GroupQueryAttention" => true,
        "com.microsoft.MultiHeadAttention" => false,
        other => return Err(unsupported(other, "this operator is not understood")),
    };
    let rotary = case.attributes.get("rotary");
    if rotary.is_some_and(|rotary| rotary != "none")
        || case.choice("do_rotary", &[0, 1], 0)? == 1
        || case.input_opt("cos_cache").is_some()
    {
        return Err(unsupported("rotary embedding", "it is not built yet"));
    }
    let heads = case.attr_usize("num_heads")?;
    let kv_heads = if grouped {
        case.attr_usize("kv_num_heads")?
    } else {
        heads
    };
    let operand = |name, heads| {
        let tensor = case.input(name)?;
        let layout = match tensor.shape.len() {
            4 => Layout::HeadsFirst,
            _ => Layout::SideBySide(heads),
        };
        Operand::new(case, tensor, layout)
    };
    let mut q = operand("query", heads)?;
    let mut k = operand("key", kv_heads)?;
    let mut v = operand("value", kv_heads)?;
    case.expect_sizes(&[
        ("B", q.shape[0]),
        ("S", q.shape[1]),
        ("L", k.shape[1]),
        ("D", q.shape[3]),
        ("Dv", v.shape[3]),
        ("Hq", heads),
        ("Hkv", kv_heads),
        ("kv_num_heads", kv_heads),
    ])?;
    if let Some(bias) = case.input_opt("bias") {
        // One vector of q, k and v, added to heads that lie side by side.
        let mut rest = &bias.values[..];
        for operand in [&mut q, &mut k, &mut v] {
            let channels = operand.shape[2] * operand.shape[3];
            let Some((own, others)) = rest.split_at_checked(channels) else {
                return Err(case.error(format!(
                    "input \"bias\": expected q, k and v side by side, got {}",
                    shape_text(&bias.shape)
                )));
            };
            operand.add(case, own)?;
            rest = others;
        }
        if !rest.is_empty() {
            return Err(case.error(format!("input \"bias\": {} values too many", rest.len())));
        }
    }

    let mut read = AttentionCase::new(case, q, k, v)?;
    let new = read.problem.kv_len;
    let past = read.read_past(case)?;
    let (batch, kv_len) = (read.problem.batch, read.problem.kv_len);
    case.expect_sizes(&[("past", past)])?;
    let mut lens = vec![kv_len; batch];
    if grouped {
        // Keys of each item in all, less 1; the new ones come last.
        lens = case.lengths_of("seqlens_k")?;
        lens.iter_mut().for_each(|len| *len += 1);
        let total = case.lengths_of("total_sequence_length")?;
        if lens.len() != batch || lens.iter().max() != total.first() {
            return Err(case.error(format!(
                "seqlens_k + 1 is {lens:?} and total_sequence_length {total:?}: expected {batch} lengths and the largest"
            )));
        }
        if lens.iter().any(|len| *len < new || *len > kv_len) {
            return Err(unsupported(
                format!("items of {lens:?} keys with {new} new ones behind {past}"),
                "the new keys of an item are expected behind those that it has",
            ));
        }
    }
    let full = lens.iter().all(|len| *len == kv_len);
    if let Some(past) = &mut read.past {
        past.kept = lens.iter().map(|len| len - new).collect();
    }
    read.outputs = vec![("Y", Output::Out), ("Y_f64", Output::Out)];
    if full {
        let present = [
            ("present_key", Output::PresentKey),
            ("present_value", Output::PresentValue),
        ];
        read.outputs.extend(present);
    } else {
        read.otherwise =
            "what lies behind the last key of a shorter item is the runtime's own".into();
        read.kv_lens = Some(lens);
    }

    let causal = case.attr_bool("causal")?;
    if case.choice("unidirectional", &[0, 1], usize::from(causal))? != usize::from(causal) {
        return Err(case.error("attributes `causal` and `unidirectional` contradict each other"));
    }
    let window_left = case.window("window_left")?;
    if let Some(keys) = case.window("local_window_size")? {
        // The runtime counts the query's own key.
        case.expect_sizes(&[("window_left", keys.saturating_sub(1))])?;
    }
    let has_scale = case.attributes.contains_key("scale");
    read.problem.rules = AttentionRules {
        scale: has_scale
            .then(|| case.attr_f64("scale"))
            .transpose()?
            .map(|scale| scale as f32),
        softcap: case.softcap()?,
        causal,
        // New tokens come last, where a case says nothing else.
        alignment: match case.attributes.contains_key("align") {
            true => Some(case.alignment()?),
            false => Some(Alignment::BottomRight),
        },
        window_left,
        ..Default::default()
    };
    read.sinks = case.input_opt("head_sink").map(Values::from);
    read.bias = case.input_opt("attention_bias").map(Values::from);
    let mask_kind = case
        .attributes
        .get("mask_kind")
        .map_or("none", String::as_str);
    if let Some(input) = case.input_opt("key_padding_mask") {
        let given = input.to_usize()?;
        let shown: Vec<bool> = match (mask_kind, &input.shape[..]) {
            // Keys of each item, from the first.
            ("key_lens_1d", &[_]) => given
                .iter()
                .flat_map(|len| (0..kv_len).map(move |key| key < *len))
                .collect(),
            ("key_padding_2d", &[_, keys]) if keys == kv_len => {
                given.iter().map(|value| *value != 0).collect()
            }
            (other, shape) => {
                return Err(unsupported(
                    format!("mask_kind {other:?} of shape {}", shape_text(shape)),
                    format!("key_lens_1d (B) and key_padding_2d (B, {kv_len}) are understood"),
                ));
            }
        };
        read.mask = Some(Values {
            shape: vec![batch, 1, 1, kv_len],
            values: shown.into_iter().map(f64::from).collect(),
        });
    } else if mask_kind != "none" {
        return Err(case.error(format!(
            "mask_kind {mask_kind:?}, but no input key_padding_mask"
        )));
    }
    Ok(read)
}
