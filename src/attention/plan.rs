//! Which kernel, in which configuration, on which grid, and why.

use super::{AttentionProblem, rules};
use crate::gpu::{Capabilities, Origin, fold};
use crate::kernels::{
    ATTEND_ALL, ATTENTION_BLOCKS, ATTENTION_LANES, ATTENTION_MATRICES, BIAS, Configuration,
    DECODE_ROWS, EIGHTS_F32, EIGHTS_HALF, FOURS_ANY, FOURS_F16, FOURS_F16_ANY, FOURS_F32,
    FOURS_HALF, Form, Fragment, IN_ORDER, KERNELS, Kernel, MASK, MATRICES, NO_BIAS, NO_RULE,
    Operation, PAGES, PLAIN_SCORES, Q_OUT_ANY, Q_OUT_F32, RULE_DATA, SCORE_RULES, SPREAD_EIGHTS,
    SPREAD_SUBGROUP, STORE, TILES_HALF, Tier, compiled, matrix_chunks, rows_at_once,
};
use crate::merge::MergeProblem;
use crate::plan::{Plan, choose_kernel, is_own, lanes_of, slices, suited};
use crate::{ElementType, Error, Result};

impl AttentionProblem {
    /// Chooses kernel, configuration and grid for a device.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for sizes of 0, heads that are no multiple of the KV heads, numbers that are not finite,
    /// an alignment that must be said; [`Error::Unsupported`] for a tier of arithmetic that is asked for and that the device lacks, has not
    /// qualified, or that is not for this problem; [`Error::LimitExceeded`] for values of more than 256 channels (in the lanes form, if that
    /// is asked for, heads of more than 256, 64 where the device's subgroups are not known to be of 4 or 8, of few queries 128), and for what does not fit the device or 32-bit counting.
    pub fn plan(&self, capabilities: &Capabilities) -> Result<Plan> {
        self.check()?;
        self.check_rule(capabilities)?;
        let tier = self.choose_tier(capabilities)?;
        // The kernels for few queries are of plain arithmetic.
        let few =
            (1..=MOST_DECODED).contains(&self.q_len) && self.tier.is_none_or(|t| t == Tier::Plain);
        let mut no_decode = None;
        if self.decode.unwrap_or(few) {
            match self.plan_decode(capabilities) {
                Ok(plan) => return Ok(plan),
                Err(error) if self.decode.is_some() => return Err(error),
                Err(error) => no_decode = Some(error),
            }
        }
        let form = match tier {
            Tier::Plain => self.form,
            _ => Some(Form::Tiled),
        };
        let (mut kernel, mut reason) = choose_kernel(Operation::Attention, capabilities, form)?;
        if tier == Tier::Matrices {
            capabilities.can_run(&ATTENTION_MATRICES)?;
            kernel = &ATTENTION_MATRICES;
        }
        if tier != Tier::Plain {
            reason = match self.tier {
                None => format!("{tier}, which this device has qualified"),
                Some(_) => format!("{tier} as asked"),
            };
        }
        if kernel.form == Form::Lanes && self.suits_blocks(capabilities) {
            kernel = &ATTENTION_BLOCKS;
            reason.push_str(&format!(
                "; keys in blocks, since heads have more than {MOST_WRITTEN_OUT} channels"
            ));
        }
        let mut fitting = self.configurations(kernel, capabilities, tier);
        if fitting.is_empty() {
            let tiled = choose_kernel(Operation::Attention, capabilities, Some(Form::Tiled))?.0;
            let refusal = self.refusal(kernel, capabilities);
            if form.is_some() || tiled.name == kernel.name {
                return Err(refusal);
            }
            reason = match refusal {
                Error::LimitExceeded {
                    what,
                    needed,
                    available,
                    ..
                } => format!(
                    "tiles, since {} goes up to {available} channels and {what} is {needed}",
                    kernel.name
                ),
                other => format!("tiles ({other})"),
            };
            kernel = tiled;
            fitting = self.configurations(kernel, capabilities, tier);
        }
        // Large blocks where at least two of them are full, and where a GPU still has enough of them.
        let workgroups = |c: &Configuration| {
            let heads = (self.heads as u64).saturating_mul(self.batch as u64);
            self.row_tiles(kernel, c).saturating_mul(heads)
        };
        let full = |c: &&Configuration| {
            2 * queries_per_group(kernel, c) <= self.q_len as u64
                && (kernel.form == Form::Lanes || workgroups(c) >= ENOUGH_BLOCKS_TILED)
        };
        let chosen = fitting.iter().rev().find(full);
        let chosen = chosen.or(fitting.first());
        let configuration = chosen
            .cloned()
            .ok_or_else(|| self.refusal(kernel, capabilities))?;
        if fitting.len() > 1 && kernel.form == Form::Tiled {
            let largest = fitting.last().filter(|largest| **largest != configuration);
            reason.push_str(match largest {
                None => "; large blocks, since there are enough of them for a GPU",
                Some(c) if 2 * queries_per_group(kernel, c) > self.q_len as u64 => {
                    "; small blocks, since there are few queries"
                }
                Some(_) => "; small blocks, since there are few large ones",
            });
        }
        let mut plan = self.planned(kernel, configuration, None, reason, capabilities)?;
        if let Some(error) = no_decode {
            plan.reason.push_str(&format!(
                "; the kernels for few queries do not fit ({error})"
            ));
        }
        log::debug!("{self:?} -> {plan}");
        Ok(plan)
    }

    /// Whether the kernel of the lanes form for large heads can compute it, and suits. (It makes more iterations than the other, so that it
    /// needs parts of the keys, and memory for them, sooner; packed sequences cannot be computed in parts.)
    fn suits_blocks(&self, capabilities: &Capabilities) -> bool {
        let kernel = &ATTENTION_BLOCKS;
        let ends = |c: &Configuration| self.parts(kernel, c, capabilities).is_ok();
        self.head_dim.max(self.value_dim) > MOST_WRITTEN_OUT
            && capabilities.can_run(kernel).is_ok()
            && self
                .configurations(kernel, capabilities, Tier::Plain)
                .last()
                .is_some_and(ends)
    }

    /// The arithmetic to compute it with: what is asked for, or the fastest that the device has qualified and that suits.
    fn choose_tier(&self, capabilities: &Capabilities) -> Result<Tier> {
        let Some(tier) = self.tier else {
            return Ok(self.tiers(capabilities).next().unwrap_or(Tier::Plain));
        };
        if tier == Tier::Plain {
            return Ok(tier);
        }
        let refused = |reason: String| {
            Err(Error::Unsupported {
                what: tier.to_string(),
                reason,
            })
        };
        if !capabilities.offers(tier) {
            return refused(format!(
                "the device lacks what it takes, or was opened without it ({}); use plain arithmetic, which every device has",
                tier.feature_names()
            ));
        }
        if !capabilities.has_qualified(tier) {
            return refused(
                "it has not been found right on this device: Gpu::qualify gives a handle that may use what it found right".into(),
            );
        }
        if self.form == Some(Form::Lanes) || self.decode == Some(true) {
            return refused(
                "only kernels of the tiled form for many queries have it; leave form and decode to the planner".into(),
            );
        }
        match self.tier_suits(tier) {
            Ok(()) => Ok(tier),
            Err(reason) => refused(reason),
        }
    }

    /// The tiers that it can be computed with on a device, the fastest first: the one that is asked for, or all that the device has qualified
    /// and that suit.
    fn tiers(&self, capabilities: &Capabilities) -> impl Iterator<Item = Tier> {
        let tiled = self.form.unwrap_or(suited(capabilities)) == Form::Tiled;
        let usable = move |tier: &Tier| {
            let faster =
                tiled && capabilities.has_qualified(*tier) && self.tier_suits(*tier).is_ok();
            self.tier
                .map_or(*tier == Tier::Plain || faster, |asked| asked == *tier)
        };
        [Tier::Matrices, Tier::Half, Tier::Plain]
            .into_iter()
            .filter(usable)
    }

    /// Whether a tier is for such a problem; if not, why.
    fn tier_suits(&self, tier: Tier) -> std::result::Result<(), String> {
        if tier != Tier::Plain && [self.q_type, self.kv_type] != [ElementType::F16; 2] {
            let (q, kv) = (self.q_type, self.kv_type);
            return Err(format!(
                "it is for q, k and v of f16, and q is {q}, k and v are {kv}"
            ));
        }
        let (head_dim, value_dim) = (self.head_dim, self.value_dim);
        if tier == Tier::Matrices && head_dim.max(value_dim) > MOST_BY_MATRICES {
            return Err(format!(
                "it goes up to {MOST_BY_MATRICES} channels, and heads have {head_dim}, their values {value_dim}"
            ));
        }
        Ok(())
    }

    /// The plan of the kernels for few queries.
    fn plan_decode(&self, capabilities: &Capabilities) -> Result<Plan> {
        let (mut kernel, mut reason) = choose_kernel(Operation::Decode, capabilities, self.form)?;
        let mut fitting = self.configurations(kernel, capabilities, Tier::Plain);
        if fitting.is_empty() {
            let refusal = self.refusal(kernel, capabilities);
            let tiled = choose_kernel(Operation::Decode, capabilities, Some(Form::Tiled))?.0;
            if self.form.is_some() || tiled.name == kernel.name {
                return Err(refusal);
            }
            reason = format!("tiles, since {} does not do it ({refusal})", kernel.name);
            kernel = tiled;
            fitting = self.configurations(kernel, capabilities, Tier::Plain);
        }
        // Query heads that share a KV head are rows of one workgroup, and so are its queries.
        let rows = self.rows_of_kv_head();
        // A single row has a kernel of its own, for the heads that it is compiled for.
        if rows == 1
            && kernel.form == DECODE_ROWS.form
            && capabilities.can_run(&DECODE_ROWS).is_ok()
        {
            let single = self.configurations(&DECODE_ROWS, capabilities, Tier::Plain);
            if !single.is_empty() {
                (kernel, fitting) = (&DECODE_ROWS, single);
            }
        }
        let holds = |c: &&Configuration| u64::from(c.get("ROWS")) >= rows;
        let chosen = fitting.iter().find(holds).or(fitting.last());
        let configuration = chosen
            .cloned()
            .ok_or_else(|| self.refusal(kernel, capabilities))?;
        let plan = self.planned(kernel, configuration, None, reason, capabilities)?;
        log::debug!("{self:?} -> {plan}");
        Ok(plan)
    }

    /// The plan of a kernel in a configuration that can compute this; of one for few queries with the keys in that many parts, if
    /// that is said.
    fn planned(
        &self,
        kernel: &'static Kernel,
        configuration: Configuration,
        splits: Option<u64>,
        reason: String,
        capabilities: &Capabilities,
    ) -> Result<Plan> {
        capabilities.can_bind(kernel, &configuration)?;
        let decodes = kernel.operation == Operation::Decode;
        let (parts, splits) = match decodes {
            true => {
                let workgroups = self.groups(kernel, &configuration, 1);
                let fewest =
                    self.splits(kernel, &configuration, workgroups, capabilities, splits)?;
                (1, fewest)
            }
            false => match self.parts(kernel, &configuration, capabilities)? {
                1 => (
                    1,
                    self.side_by_side(kernel, &configuration, capabilities, splits)?,
                ),
                parts => (parts, 1),
            },
        };
        let rows_per_group = queries_per_group(kernel, &configuration);
        let groups = self.groups(kernel, &configuration, splits);
        let channels = (self.head_dim as u64).saturating_add(self.value_dim as u64);
        let (workspace_bytes, gathered) = self.gathered_tables();
        let mut reason = match decodes {
            true => {
                let rows = self.rows_of_kv_head();
                format!(
                    "{reason}; few queries: {} of the {rows} rows of each KV head a workgroup",
                    rows_per_group.min(rows)
                )
            }
            false => format!("{reason}; {rows_per_group} queries a workgroup"),
        };
        if parts > 1 {
            let limit = capabilities.max_loop_iterations;
            reason.push_str(&format!(
                "; keys in {parts} parts, since the adapter ends loops after {limit} iterations"
            ));
        }
        reason.push_str(&gathered_words(gathered, workspace_bytes));
        let cost = self.cost(groups, rows_per_group) / parts.max(splits).max(1);
        Ok(Plan {
            grid: fold(groups, capabilities, "attention")?,
            groups: groups as u32,
            parts: parts as u32,
            splits: splits as u32,
            slices: slices(cost, groups, capabilities),
            flops: self.pairs().saturating_mul(2 * channels),
            workspace_bytes: workspace_bytes.saturating_add(self.parts_bytes(parts.max(splits))),
            reason,
            kernel,
            configuration,
        })
    }

    /// Every plan that could compute this on a device by kernels of the form that planning takes (or that is asked for): first
    /// the one that [`plan`](Self::plan) gives, then other sizes of its tiles and, for few queries, other numbers of parts of the keys and the kernel
    /// for many. What [`tune`](Self::tune) measures.
    ///
    /// # Errors
    ///
    /// As [`plan`](Self::plan).
    pub fn candidates(&self, capabilities: &Capabilities) -> Result<Vec<Plan>> {
        let planned = self.plan(capabilities)?;
        let form = planned.kernel.form;
        let mut candidates = vec![planned];
        let few = (1..=MOST_DECODED).contains(&self.q_len);
        let single = self.rows_of_kv_head() == 1;
        for kernel in KERNELS.iter().copied() {
            let suits = match kernel.operation {
                Operation::Attention => self.decode != Some(true),
                Operation::Decode => self.decode.unwrap_or(few),
                _ => false,
            };
            let suits = suits && (single || !std::ptr::eq(kernel, &DECODE_ROWS));
            if !suits || kernel.form != form || capabilities.can_run(kernel).is_err() {
                continue;
            }
            let tiers = self.tiers(capabilities);
            let configurations =
                tiers.flat_map(|tier| self.configurations(kernel, capabilities, tier));
            for configuration in configurations {
                let mut plan_of = |splits| {
                    let reason = "a candidate".to_string();
                    let plan =
                        self.planned(kernel, configuration.clone(), splits, reason, capabilities);
                    // (One that does not fit the device is none.)
                    let Ok(plan) = plan else { return None };
                    let same = |other: &Plan| {
                        other.kernel.name == plan.kernel.name
                            && other.configuration == plan.configuration
                            && other.splits == plan.splits
                    };
                    let splits = plan.splits;
                    if !candidates.iter().any(same) {
                        candidates.push(plan);
                    }
                    Some(u64::from(splits))
                };
                let splits = plan_of(None);
                let many = |splits: &u64| kernel.operation == Operation::Decode || *splits > 1;
                if let Some(splits) = splits.filter(many) {
                    plan_of(Some(splits.div_ceil(2)));
                    plan_of(Some(splits * 2));
                }
            }
        }
        Ok(candidates)
    }

    /// Rows of a KV head: the queries of the heads that share it.
    fn rows_of_kv_head(&self) -> u64 {
        let group = self.heads / self.kv_heads.max(1);
        (self.q_len as u64).saturating_mul(group as u64)
    }

    /// In how many parts the decode kernels walk over the keys: as many as are asked for, or enough to give the adapter work; and
    /// enough to let every loop end by itself.
    fn splits(
        &self,
        kernel: &Kernel,
        configuration: &Configuration,
        workgroups: u64,
        capabilities: &Capabilities,
        asked: Option<u64>,
    ) -> Result<u64> {
        let (enough_workgroups, fewest_keys, block) = match kernel.form {
            Form::Lanes => (ENOUGH_WORKGROUPS_LANES, FEWEST_KEYS_LANES, 32),
            Form::Tiled => (ENOUGH_WORKGROUPS_TILED, FEWEST_KEYS_TILED, 64),
        };
        let channels = self.head_dim as u64;
        let all = self.key_range().len() as u64;
        // Within a window there are only so many keys to walk over.
        let queries = u64::from(configuration.get("ROWS"));
        let keys = match self.window() {
            (left @ 0.., right @ 0..) => all.min(left as u64 + right as u64 + queries),
            _ => all,
        };
        // Packed sequences have as many tokens as come with a call, so that there is no workspace to plan.
        if self.packed || self.grid_is_empty() {
            capabilities.can_loop(kernel, configuration, keys, channels)?;
            return Ok(1);
        }
        let wanted = enough_workgroups.div_ceil(workgroups.max(1));
        let wanted = asked.unwrap_or(wanted.min(keys / fewest_keys));
        let mut splits = wanted.clamp(1, MOST_SPLITS);
        // A part has whole blocks.
        let part = |splits: u64| keys.div_ceil(block).div_ceil(splits) * block;
        let walk = |keys: u64| (kernel.loop_iterations)(configuration, keys, channels);
        while walk(part(splits)) > capabilities.max_loop_iterations {
            if part(splits) <= block {
                capabilities.can_loop(kernel, configuration, block, channels)?;
            }
            splits *= 2;
        }
        let (needed, available) = (self.parts_bytes(splits), capabilities.max_binding_bytes);
        if needed > available {
            let what = format!("the outputs of {splits} parts of the keys");
            let limit = "max_storage_buffer_binding_size";
            return Err(Error::limit_bytes(what, limit, needed, available));
        }
        if splits > 1 {
            self.merge_of(splits as usize).plan(capabilities)?;
        }
        Ok(splits)
    }

    /// In how many parts attention_tiled walks over the keys, side by side: as many as are asked for, or so many that a GPU is busy which the
    /// tiles of queries alone would leave idle.
    fn side_by_side(
        &self,
        kernel: &Kernel,
        configuration: &Configuration,
        capabilities: &Capabilities,
        asked: Option<u64>,
    ) -> Result<u64> {
        if !can_split(kernel) || self.packed || self.grid_is_empty() {
            return Ok(1);
        }
        let workgroups = self.groups(kernel, configuration, 1);
        let wanted = match capabilities.device_type {
            wgpu::DeviceType::Cpu => 1,
            _ => {
                let keys = self.key_range().len() as u64;
                (ENOUGH_WORKGROUPS / workgroups.max(1)).min(keys / FEWEST_KEYS_TILED)
            }
        };
        let splits = asked.unwrap_or(wanted).clamp(1, MOST_SPLITS);
        // Memory for the parts, and their merge; where they do not fit the device, it goes without.
        let fits = self.parts_bytes(splits) <= capabilities.max_binding_bytes
            && self.merge_of(splits as usize).plan(capabilities).is_ok();
        Ok(if fits { splits } else { 1 })
    }

    /// Workgroups in all, where each has one of that many parts of the keys.
    fn groups(&self, kernel: &Kernel, configuration: &Configuration, splits: u64) -> u64 {
        let heads = match kernel.operation {
            Operation::Decode => self.kv_heads,
            _ => self.heads,
        };
        let splits = if can_split(kernel) { splits } else { 1 };
        self.row_tiles(kernel, configuration)
            .saturating_mul(heads as u64)
            .saturating_mul(self.batch as u64)
            .saturating_mul(splits)
    }

    /// What that many workgroups do at most, in floating-point operations: each row of each of them with every key that rules
    /// of position leave one, those of a causal mask included.
    fn cost(&self, groups: u64, rows: u64) -> u64 {
        let all = self.key_range().len() as u64;
        let keys = match self.window() {
            (left @ 0.., right @ 0..) => all.min(left as u64 + right as u64 + rows),
            _ => all,
        };
        let channels = (self.head_dim as u64).saturating_add(self.value_dim as u64);
        groups
            .saturating_mul(rows)
            .saturating_mul(keys)
            .saturating_mul(2 * channels)
    }

    /// Whether a plan is this crate's own through and through: one that planning makes for this problem on this device, if
    /// perhaps with another of its configurations or fewer workgroups.
    pub(super) fn origin_of(&self, plan: &Plan, capabilities: &Capabilities) -> Origin {
        let made = match plan.kernel.operation {
            _ if self.rules.rule.is_some() || !is_own(plan.kernel) => false,
            Operation::Weights => self.plan_weights(capabilities).is_ok_and(|own| {
                own.configuration == plan.configuration && plan.groups <= own.groups
            }),
            _ => {
                let groups = self.groups_of(plan);
                let tier = plan.kernel.tier(&plan.configuration);
                u64::from(plan.groups) <= groups
                    && self
                        .configurations(plan.kernel, capabilities, tier)
                        .contains(&plan.configuration)
            }
        };
        match made {
            true => Origin::Own,
            false => Origin::Callers,
        }
    }

    /// Workgroups that a plan needs for this problem, as many parts of the keys as it has.
    fn groups_of(&self, plan: &Plan) -> u64 {
        self.groups(
            plan.kernel,
            &plan.configuration,
            u64::from(plan.splits.max(1)),
        )
    }

    /// What a caller may have got wrong in a plan, as far as this problem is concerned.
    ///
    /// # Errors
    ///
    /// [`Error::LimitExceeded`] where its workgroups are more than 32 bits count (or a grid holds), [`Error::Parameter`] for parts that it cannot
    /// have, [`Error::Unsupported`] for arithmetic that is not for this problem.
    pub(super) fn check_own_plan(&self, plan: &Plan, capabilities: &Capabilities) -> Result<()> {
        for (name, parts) in [("plan.parts", plan.parts), ("plan.splits", plan.splits)] {
            if self.packed && parts > 1 {
                let rule = "must be 1: packed sequences are not computed in parts of the keys";
                return Err(Error::parameter(name, parts, rule));
            }
            if parts > MOST_PARTS {
                let rule = format!("must be at most {MOST_PARTS}");
                return Err(Error::parameter(name, parts, rule));
            }
        }
        if plan.splits > 1 && (plan.parts > 1 || !can_split(plan.kernel)) {
            let rule = "must be 1: attention_lanes and attention in parts one after another do not split keys side by side";
            return Err(Error::parameter("plan.splits", plan.splits, rule));
        }
        let tier = plan.kernel.tier(&plan.configuration);
        if let (true, Err(reason)) = (tier != Tier::Plain, self.tier_suits(tier)) {
            let what = tier.to_string();
            return Err(Error::Unsupported { what, reason });
        }
        // Kernels count workgroups, and what they make of their numbers, in 32 bits.
        fold(self.groups_of(plan), capabilities, "attention").map(drop)
    }

    fn grid_is_empty(&self) -> bool {
        self.batch == 0 || self.q_len == 0
    }

    /// Workgroups along the queries of one head or, of the decode kernels, along the rows of one KV head.
    pub(super) fn row_tiles(&self, kernel: &Kernel, configuration: &Configuration) -> u64 {
        let per_group = queries_per_group(kernel, configuration);
        let rows = match kernel.operation {
            Operation::Decode => self.rows_of_kv_head(),
            _ => self.q_len as u64,
        };
        rows.div_ceil(per_group)
    }

    /// The plan of [`AttentionWeights`](crate::AttentionWeights): the kernel's form, v and the output play no part.
    ///
    /// # Errors
    ///
    /// As [`plan`](Self::plan).
    pub fn plan_weights(&self, capabilities: &Capabilities) -> Result<Plan> {
        self.check()?;
        self.check_rule(capabilities)?;
        let (kernel, _) = choose_kernel(Operation::Weights, capabilities, Some(Form::Tiled))?;
        let rules = self.rule_fragments();
        let configuration = Configuration {
            consts: vec![("KV_TYPE", self.kv_type.float_number().unwrap_or(0))],
            rules,
        };
        capabilities.can_bind(kernel, &configuration)?;
        let (keys, channels) = (self.kv_len as u64, self.head_dim as u64);
        capabilities.can_loop(kernel, &configuration, keys, channels)?;
        let rows = match self.kv_len {
            0 => 0,
            _ => (self.q_len as u64)
                .saturating_mul(self.heads as u64)
                .saturating_mul(self.batch as u64),
        };
        let (workspace_bytes, _) = self.gathered_tables();
        Ok(Plan {
            grid: fold(rows, capabilities, "attention weights")?,
            groups: rows as u32,
            parts: 1,
            splits: 1,
            slices: slices(self.cost(rows, 1), rows, capabilities),
            flops: self.pairs().saturating_mul(2 * self.head_dim as u64),
            workspace_bytes,
            reason: "a row a workgroup".into(),
            kernel,
            configuration,
        })
    }

    /// In how many parts the keys must be walked over, so that every loop ends by itself.
    fn parts(
        &self,
        kernel: &Kernel,
        configuration: &Configuration,
        capabilities: &Capabilities,
    ) -> Result<u64> {
        let (keys, channels) = (self.key_range().len() as u64, self.head_dim as u64);
        let walk = |keys| (kernel.loop_iterations)(configuration, keys, channels);
        // Within a window a workgroup walks over the keys of its own queries alone.
        let (left, right) = self.window();
        let walked = match (u64::try_from(left), u64::try_from(right)) {
            (Ok(left), Ok(right)) => left + right + queries_per_group(kernel, configuration),
            _ => u64::MAX,
        };
        if walk(keys.min(walked)) <= capabilities.max_loop_iterations {
            return Ok(1);
        }
        // The longest part that ends by itself; iterations grow with the keys.
        let (mut most, mut too_many) = (0, keys);
        while too_many - most > 1 {
            let middle = most + (too_many - most) / 2;
            if walk(middle) <= capabilities.max_loop_iterations {
                most = middle;
            } else {
                too_many = middle;
            }
        }
        // Packed sequences have as many tokens as come with a call, so that there is no workspace to plan.
        if most == 0 || self.packed {
            capabilities.can_loop(kernel, configuration, keys, channels)?;
        }
        let parts = keys.div_ceil(most.max(1));
        // The merge binds all of them at once.
        let (needed, available) = (self.parts_bytes(parts), capabilities.max_binding_bytes);
        if needed > available {
            let what = format!("the outputs of {parts} parts of the keys");
            let limit = "max_storage_buffer_binding_size";
            return Err(Error::limit_bytes(what, limit, needed, available));
        }
        self.merge_of(parts as usize).plan(capabilities)?;
        Ok(parts)
    }

    /// The merge of that many parts.
    pub(super) fn merge_of(&self, parts: usize) -> MergeProblem {
        MergeProblem {
            parts,
            batch: self.batch,
            heads: self.heads,
            q_len: self.q_len,
            value_dim: self.value_dim,
            out_type: self.out_type,
        }
    }

    /// Bytes of the outputs of the parts and of their log-sum-exp.
    fn parts_bytes(&self, parts: u64) -> u64 {
        if parts <= 1 {
            return 0;
        }
        let rows = (self.batch as u64)
            .saturating_mul(self.q_len as u64)
            .saturating_mul(self.heads as u64);
        let row = (self.value_dim as u64).saturating_add(2).saturating_mul(4);
        rows.saturating_mul(row).saturating_mul(parts)
    }

    /// Bytes into which small operands are gathered, and how many of them: none where there is one at most.
    pub(super) fn gathered_tables(&self) -> (u64, usize) {
        match rules::table_words(self) {
            (words, count) if count > 1 => (words.saturating_mul(4), count),
            _ => (0, 0),
        }
    }

    /// A rule that loops is refused where loops end early: nobody knows how often it goes round.
    fn check_rule(&self, capabilities: &Capabilities) -> Result<()> {
        match &self.rules.rule {
            Some(rule) if rule.loops() && capabilities.max_loop_iterations < u64::MAX => {
                Err(Error::Unsupported {
                    what: "a rule with a loop".into(),
                    reason: format!(
                        "this adapter ends all loops of an invocation after {} iterations without a word; write the loop out, or use another adapter",
                        capabilities.max_loop_iterations
                    ),
                })
            }
            _ => Ok(()),
        }
    }

    /// The rule fragments that this problem needs: those of one of the sets that are compiled anyway, and for a
    /// rule of the caller's own exactly what is used.
    fn rule_fragments(&self) -> Vec<Fragment> {
        let scores = self.rules.changes_scores();
        let mask = self.rules.mask || scores && self.rules.rule.is_none();
        let mut fragments = vec![
            if mask { &MASK } else { &ATTEND_ALL }.clone(),
            if scores { &SCORE_RULES } else { &PLAIN_SCORES }.clone(),
        ];
        if scores {
            let bias = self.rules.bias || self.rules.rule.is_none();
            fragments.push(if bias { &BIAS } else { &NO_BIAS }.clone());
        }
        let paged = self.page_size.is_some();
        fragments.push(if paged { &PAGES } else { &IN_ORDER }.clone());
        match &self.rules.rule {
            None => fragments.push(NO_RULE.clone()),
            Some(rule) => {
                fragments.push(rule.fragment().clone());
                if rule.reads_data() {
                    fragments.push(RULE_DATA.clone());
                }
            }
        }
        fragments
    }

    /// The configurations of a kernel that can compute this, from the smallest block of queries to the largest;
    /// empty where it has none for these sizes.
    fn configurations(
        &self,
        kernel: &Kernel,
        capabilities: &Capabilities,
        tier: Tier,
    ) -> Vec<Configuration> {
        if self.tier_suits(tier).is_err() {
            return Vec::new();
        }
        let mut all = variant(kernel, capabilities);
        all.retain(|c| c.rules.contains(&TILES_HALF) == (tier == Tier::Half));
        all.retain(|c| c.rules.contains(&MATRICES) == (tier == Tier::Matrices));
        if tier == Tier::Matrices {
            all.retain(|c| Some(c.get("CHUNKS")) == matrix_chunks(self.head_dim));
        }
        let number = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
        let (head_dim, value_dim) = (number(self.head_dim), number(self.value_dim));
        // The smallest compiled size that holds what the kernel holds of it.
        let sizes = |name: &str| {
            let mut sizes: Vec<u32> = all.iter().map(|c| c.get(name)).collect();
            sizes.sort_unstable();
            sizes
        };
        let (name, size) = match kernel.form {
            Form::Tiled => ("VALUE_DIM", value_dim),
            Form::Lanes => ("HEAD_DIM", head_dim.max(value_dim)),
        };
        let Some(size) = compiled(&sizes(name), size) else {
            return Vec::new();
        };
        let kv_type = self.kv_type.float_number();
        all.retain(|c| c.get(name) == size && Some(c.get("KV_TYPE")) == kv_type);
        let reads = self.reads(kernel, tier);
        let has = |reads: &&Fragment| all.iter().any(|c| c.rules.contains(reads));
        let fewest = reads.iter().copied().find(has);
        let fits = |c: &Configuration| match fewest {
            Some(fewest) => c.rules.contains(fewest),
            None => reads.is_empty(),
        };
        let mut fitting: Vec<Configuration> = all.iter().filter(|c| fits(c)).cloned().collect();
        // Configurations come in sets of rules, any of which stands for the rules of this problem; but where there are some for
        // its kind of scores, those may have other sizes.
        // (A caller's own rule takes registers as score rules do.)
        let changed = self.rules.changes_scores() || self.rules.rule.is_some();
        let of_its_kind = |c: &Configuration| c.rules.contains(&SCORE_RULES) == changed;
        if fitting.iter().any(of_its_kind) {
            fitting.retain(of_its_kind);
        }
        let mut distinct: Vec<Configuration> = Vec::new();
        for mut configuration in fitting {
            if !distinct.iter().any(|c| c.consts == configuration.consts) {
                configuration.rules.retain(|rule| !rule.is_rule());
                configuration.rules.splice(0..0, self.rule_fragments());
                distinct.push(configuration);
            }
        }
        // A caller's own rule may need memory that the set of rules which stands for it does not.
        distinct.retain(|c| (kernel.workgroup_bytes)(c) <= capabilities.max_workgroup_bytes);
        distinct
    }

    /// How a kernel can read k and v, the fewest loads first: eight or four channels in one load where heads are multiples of as many.
    /// (Where rows of a call's operands do not begin there, what [`narrower`] gives takes its place.) None for decode_tiled. Kernels of the lanes
    /// form for many queries read q and write the output by fours too where all of them are f32.
    fn reads(&self, kernel: &Kernel, tier: Tier) -> Vec<&'static Fragment> {
        let whole = |channels: usize| {
            self.head_dim.is_multiple_of(channels) && self.value_dim.is_multiple_of(channels)
        };
        let types = [self.q_type, self.kv_type, self.out_type];
        let alike = self.kv_type != ElementType::F32 || types == [ElementType::F32; 3];
        let by_channels: [Option<&Fragment>; 3] = match (tier, self.kv_type) {
            _ if (kernel.operation, kernel.form) == (Operation::Decode, Form::Tiled) => [None; 3],
            (Tier::Plain, _) if of_lanes(kernel) && !alike => [None, None, Some(&FOURS_ANY)],
            (Tier::Plain, ElementType::F32) => {
                [Some(&EIGHTS_F32), Some(&FOURS_F32), Some(&FOURS_ANY)]
            }
            (Tier::Plain, _) => [Some(&EIGHTS_HALF), Some(&FOURS_HALF), Some(&FOURS_ANY)],
            _ => [None, Some(&FOURS_F16), Some(&FOURS_F16_ANY)],
        };
        let of_channels = [8, 4, 1].into_iter().zip(by_channels);
        of_channels
            .filter(|(channels, _)| whole(*channels))
            .filter_map(|(_, reads)| reads)
            .collect()
    }

    /// Why a kernel has no configuration for this problem: the head is too large.
    fn refusal(&self, kernel: &Kernel, capabilities: &Capabilities) -> Error {
        let name = match kernel.form {
            Form::Tiled => "VALUE_DIM",
            Form::Lanes => "HEAD_DIM",
        };
        let sizes = variant(kernel, capabilities);
        let largest = sizes.iter().map(|c| c.get(name)).max().unwrap_or(0);
        let (what, needed) = match kernel.form {
            Form::Lanes if self.head_dim >= self.value_dim => ("head_dim", self.head_dim),
            _ => ("value_dim", self.value_dim),
        };
        Error::LimitExceeded {
            what: what.into(),
            limit: format!("the largest head of {}", kernel.name),
            needed: needed as u64,
            available: u64::from(largest),
            unit: "channels",
        }
    }
}

/// Whether a kernel can have the keys in parts side by side.
pub(super) fn can_split(kernel: &Kernel) -> bool {
    kernel.operation == Operation::Decode
        || (kernel.operation == Operation::Attention && kernel.form == Form::Tiled)
}

/// Whether a kernel is of the lanes form and for many queries. Such a kernel has what all its lanes need handed round in one of several
/// ways, and reads q and stores the output by fours where k and v are read so.
fn of_lanes(kernel: &Kernel) -> bool {
    kernel.operation == Operation::Attention && kernel.form == Form::Lanes
}

/// The configurations of a kernel that suit the subgroups of a device.
fn variant(kernel: &Kernel, capabilities: &Capabilities) -> Vec<Configuration> {
    let mut all = (kernel.configurations)();
    if of_lanes(kernel) {
        let (lanes, spread) = lanes_of(capabilities, &ATTENTION_LANES);
        let spreads = [spread, &SPREAD_EIGHTS];
        all.retain(|c| c.get("LANES") == lanes && spreads.iter().any(|s| c.rules.contains(s)));
        all.retain(|c| capabilities.suits(c));
    }
    all
}

/// Channels of a head, and of its values, up to which matrix units multiply them.
const MOST_BY_MATRICES: usize = 128;

/// Channels up to which attention_lanes, whose code grows with them, is faster than attention_blocks.
const MOST_WRITTEN_OUT: usize = 64;

/// Queries up to which the kernels for few queries are taken.
const MOST_DECODED: usize = 8;

/// Workgroups that keep an adapter busy: the cores of a CPU take one after the other, a GPU hundreds at once.
const ENOUGH_WORKGROUPS_LANES: u64 = 8;
const ENOUGH_WORKGROUPS_TILED: u64 = 512;

/// Blocks of queries that keep a GPU busy: it takes some hundred workgroups at once.
const ENOUGH_BLOCKS_TILED: u64 = 128;

/// Workgroups of attention_tiled, of 64 or 128 invocations, that keep most GPUs busy.
const ENOUGH_WORKGROUPS: u64 = 256;

/// Keys below which a part is not worth its workgroup and its place in the merge.
const FEWEST_KEYS_LANES: u64 = 64;
const FEWEST_KEYS_TILED: u64 = 256;

/// Parts in which keys are split at most for the sake of speed.
const MOST_SPLITS: u64 = 64;

/// Parts of the keys that a plan may have at most: their numbers by a block's keys are counted in 32 bits.
const MOST_PARTS: u32 = 1 << 20;

/// The same configuration of a kernel for rows that begin where no more than that many channels, 4 or 1, can be loaded at once; of any type
/// if it is 1. `None` where its own does, or it is another kernel's.
pub(super) fn narrower(configuration: &Configuration, channels: usize) -> Option<Configuration> {
    let by_fours = [(&EIGHTS_F32, &FOURS_F32), (&EIGHTS_HALF, &FOURS_HALF)]
        .into_iter()
        .find_map(|(eights, fours)| configuration.exchanged(eights, &[fours]))
        .and_then(|reads| reads.exchanged(&SPREAD_EIGHTS, &[&SPREAD_SUBGROUP]))
        .map(|mut by_fours| {
            let [lanes, spread] = ["LANES", "SPREAD"].map(|name| by_fours.get(name));
            let together = rows_at_once(lanes, spread, false);
            let consts = by_fours.consts.iter_mut();
            let rows = consts.filter(|(name, _)| *name == "TOGETHER");
            rows.for_each(|(_, value)| *value = together);
            by_fours
        });
    if channels >= 4 {
        return by_fours;
    }
    let own = by_fours.as_ref().unwrap_or(configuration);
    let keys = [
        (&FOURS_F32, &FOURS_ANY),
        (&FOURS_HALF, &FOURS_ANY),
        (&FOURS_F16, &FOURS_F16_ANY),
    ]
    .into_iter()
    .find_map(|(fours, any)| own.exchanged(fours, &[any]));
    let queries = keys.as_ref().unwrap_or(configuration);
    queries
        .exchanged(&Q_OUT_F32, &[&STORE, &Q_OUT_ANY])
        .or(keys)
}

/// What a plan says of small operands that are gathered.
fn gathered_words(count: usize, bytes: u64) -> String {
    match count {
        0 => String::new(),
        _ => format!(
            "; {count} small operands are copied into one buffer of {bytes} bytes, unless they lie in one"
        ),
    }
}

/// Queries (of the decode kernels: rows, a query of a head each) that one workgroup computes.
pub(super) fn queries_per_group(kernel: &Kernel, configuration: &Configuration) -> u64 {
    let number = |name: &str| u64::from(configuration.get(name));
    let rows = match (kernel.operation, kernel.form) {
        (Operation::Decode, _) => number("ROWS"),
        (_, Form::Tiled) => 4 * number("DOWN"),
        (_, Form::Lanes) => number("LANES") * number("ROWS"),
    };
    rows.max(1)
}
