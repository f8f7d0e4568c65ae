//! Reads a listing of RDNA assembly: basic blocks, the loops around them, and what their instructions do.
//!
//! A listing has a line `BB7:` before each block, and an instruction a line, with its encoding behind a semicolon. Where a
//! GPU issues two operations as one instruction (`v_dual_fmac_f32 … :: v_dual_mul_f32 …`), they are counted as the two
//! that they are.

use std::ops::AddAssign;

/// What the instructions of a block are, by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Multiply-adds of floats that one invocation makes: a packed instruction makes two.
    pub(crate) multiply_adds: u32,
    /// Vector operations that make them.
    pub(crate) multiply_add_operations: u32,
    /// Dot products of short vectors (`v_dot2…`).
    pub(crate) dots: u32,
    /// Products of matrices by a whole wave (`v_wmma…`).
    pub(crate) matrices: u32,
    /// Exponentials, logarithms, reciprocals, roots, sines.
    pub(crate) transcendental: u32,
    /// Every other vector operation: addresses, comparisons, conversions, moves.
    pub(crate) other_vector: u32,
    /// Accesses of workgroup memory.
    pub(crate) lds: u32,
    /// Bytes that they move for one invocation.
    pub(crate) lds_bytes: u32,
    /// Values handed from lane to lane through the hardware of workgroup memory.
    pub(crate) lane_exchanges: u32,
    /// Accesses of buffers by vector instructions.
    pub(crate) global: u32,
    /// Accesses of scratch memory that say so. (Others look like accesses of buffers.)
    pub(crate) scratch: u32,
    /// Loads by scalar instructions.
    pub(crate) scalar_loads: u32,
    /// Every other scalar instruction, waits and branches among them.
    pub(crate) scalar: u32,
}

impl Counts {
    /// All vector operations.
    pub(crate) fn vector(&self) -> u32 {
        self.multiply_add_operations
            + self.dots
            + self.matrices
            + self.transcendental
            + self.other_vector
    }

    /// The part of the vector operations that multiply and add, dot and matrix products among them; `None` without any.
    pub(crate) fn share(&self) -> Option<f64> {
        let products = self.multiply_add_operations + self.dots + self.matrices;
        (self.vector() > 0).then(|| f64::from(products) / f64::from(self.vector()))
    }

    /// Multiply-adds (of dot products, two each) for each access of workgroup memory; `None` without an access.
    pub(crate) fn multiply_adds_per_lds(&self) -> Option<f64> {
        (self.lds > 0).then(|| f64::from(self.multiply_adds + 2 * self.dots) / f64::from(self.lds))
    }

    /// How much of a program's product a block makes, to find the hot ones: a matrix instruction stands for many.
    fn weight(&self) -> u32 {
        self.multiply_adds + 2 * self.dots + 64 * self.matrices
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.multiply_adds += other.multiply_adds;
        self.multiply_add_operations += other.multiply_add_operations;
        self.dots += other.dots;
        self.matrices += other.matrices;
        self.transcendental += other.transcendental;
        self.other_vector += other.other_vector;
        self.lds += other.lds;
        self.lds_bytes += other.lds_bytes;
        self.lane_exchanges += other.lane_exchanges;
        self.global += other.global;
        self.scratch += other.scratch;
        self.scalar_loads += other.scalar_loads;
        self.scalar += other.scalar;
    }
}

/// A basic block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// Its label in the listing: `BB7`.
    pub(crate) label: String,
    /// Loops around it.
    pub(crate) depth: u32,
    /// What it does.
    pub(crate) counts: Counts,
}

/// A program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Program {
    /// Its blocks, as they stand.
    pub(crate) blocks: Vec<Block>,
    /// Lines that this reader does not know.
    pub(crate) unknown: Vec<String>,
    /// Instructions that the driver's own disassembler could not name: counted by their encoding, and never as
    /// multiply-adds.
    pub(crate) unnamed: u32,
}

/// Blocks that count as hot, at most.
const MOST_HOT: usize = 3;

/// Multiply-adds that make a block worth a look.
const LEAST_HOT: u32 = 4;

impl Program {
    /// All blocks together.
    pub(crate) fn total(&self) -> Counts {
        let mut total = Counts::default();
        for block in &self.blocks {
            total += block.counts;
        }
        total
    }

    /// The blocks with the most multiply-adds, at most three, as they stand in the program. They are inside a loop: what
    /// runs once does not matter. (How often a loop turns is not known here, so a block of 32 in a loop that turns 32
    /// times is as hot as one of 1024 that was written out.)
    pub(crate) fn hot(&self) -> Vec<&Block> {
        let mut ranked: Vec<(usize, &Block)> = self
            .blocks
            .iter()
            .enumerate()
            .filter(|(_, block)| block.depth > 0 && block.counts.weight() >= LEAST_HOT)
            .collect();
        ranked.sort_by_key(|(place, block)| (std::cmp::Reverse(block.counts.weight()), *place));
        ranked.truncate(MOST_HOT);
        ranked.sort_by_key(|(place, _)| *place);
        ranked.into_iter().map(|(_, block)| block).collect()
    }
}

/// Reads a listing.
pub(crate) fn read(listing: &str) -> Program {
    let mut blocks: Vec<Block> = Vec::new();
    let mut unknown: Vec<String> = Vec::new();
    let mut unnamed = 0;
    let mut last = Counts::default();
    // For each jump its block and the label that it goes to.
    let mut jumps: Vec<(usize, String)> = Vec::new();
    for text in listing.lines() {
        let (line, encoding) = text.split_once(';').unwrap_or((text, ""));
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        // The rest of an instruction that could not be named is read as an export, which compute programs have not.
        if line.starts_with("exp ") {
            continue;
        }
        // Newer versions of Mesa write a line that repeats once, and how often it does.
        if let Some(times) = line
            .strip_prefix("(then repeated ")
            .and_then(|rest| rest.split(' ').next())
        {
            match (times.parse::<u32>(), blocks.last_mut()) {
                (Ok(times), Some(block)) => (0..times).for_each(|_| block.counts += last),
                _ => unknown.push(line.to_owned()),
            }
            continue;
        }
        if let Some(label) = line.strip_suffix(':') {
            blocks.push(Block {
                label: label.to_owned(),
                depth: 0,
                counts: Counts::default(),
            });
            continue;
        }
        if blocks.is_empty() {
            blocks.push(Block {
                label: "start".into(),
                depth: 0,
                counts: Counts::default(),
            });
        }
        let place = blocks.len() - 1;
        last = Counts::default();
        if line == "(invalid instruction)" {
            unnamed += 1;
            blocks[place].counts += count_encoding(encoding);
            continue;
        }
        for operation in line.split("::") {
            let mut words = operation.split_whitespace();
            let mnemonic = words.next().unwrap_or_default();
            match count(mnemonic) {
                Some(counts) => last += counts,
                None => unknown.push(line.to_owned()),
            }
            if mnemonic.starts_with("s_branch") || mnemonic.starts_with("s_cbranch") {
                jumps.extend(words.next().map(|label| (place, label.to_owned())));
            }
        }
        blocks[place].counts += last;
    }
    // A jump back closes a loop; several to one label close the same one.
    let mut loops: Vec<(usize, usize)> = Vec::new();
    for (from, label) in jumps {
        let Some(to) = blocks.iter().position(|block| block.label == label) else {
            continue;
        };
        if to > from {
            continue;
        }
        match loops.iter_mut().find(|(first, _)| *first == to) {
            Some((_, last)) => *last = (*last).max(from),
            None => loops.push((to, from)),
        }
    }
    for (first, last) in loops {
        for block in &mut blocks[first..=last] {
            block.depth += 1;
        }
    }
    Program {
        blocks,
        unknown,
        unnamed,
    }
}

/// What one operation is; `None` if it is none that is known.
fn count(mnemonic: &str) -> Option<Counts> {
    let mut counts = Counts::default();
    // `v_dual_fmac_f32` is `v_fmac_f32`, half an instruction; `_e32`, `_e64`, `_dpp` and `_sdwa` are encodings.
    let name = mnemonic.replacen("v_dual_", "v_", 1);
    let mut words: Vec<&str> = name.split('_').collect();
    while words.len() > 2 && words.last().is_some_and(|word| ENCODINGS.contains(word)) {
        words.pop();
    }
    match *words.as_slice() {
        ["v", "nop"] => counts.scalar = 1,
        ["v", "pk", "fma" | "fmac", "f16" | "f32"] => {
            counts.multiply_adds = 2;
            counts.multiply_add_operations = 1;
        }
        ["v", operation, .., "f16" | "f32" | "f64"] if MULTIPLY_ADDS.contains(&operation) => {
            counts.multiply_adds = 1;
            counts.multiply_add_operations = 1;
        }
        ["v", operation, ..] if operation.starts_with("dot") => counts.dots = 1,
        ["v", "wmma" | "swmmac" | "mfma", ..] => counts.matrices = 1,
        ["v", operation, ..] if TRANSCENDENTAL.contains(&operation) => counts.transcendental = 1,
        ["v", ..] => counts.other_vector = 1,
        ["ds", "bpermute" | "permute" | "swizzle", ..] => counts.lane_exchanges = 1,
        ["ds", ..] => {
            counts.lds = 1;
            counts.lds_bytes = ds_bytes(&words);
        }
        // Caches are told to forget; nothing is moved.
        ["buffer", "gl0" | "gl1" | "wbinvl1" | "invl2" | "wbl2", ..] => counts.scalar = 1,
        ["buffer" | "global" | "flat" | "tbuffer", ..] => counts.global = 1,
        ["scratch", ..] => counts.scratch = 1,
        ["s", "load" | "buffer", ..] => counts.scalar_loads = 1,
        ["s", ..] => counts.scalar = 1,
        _ => return None,
    }
    Some(counts)
}

/// What an instruction without a name is, by the first bits of its encoding (`f4281a06`), which are the same on RDNA 1 to 3.
fn count_encoding(encoding: &str) -> Counts {
    let mut counts = Counts::default();
    let word = encoding.split_whitespace().next().unwrap_or_default();
    match word
        .get(..2)
        .and_then(|byte| u8::from_str_radix(byte, 16).ok())
    {
        Some(0x00..=0x7f | 0xc8..=0xcf | 0xd4..=0xd7) => counts.other_vector = 1,
        Some(0x80..=0xbf) => counts.scalar = 1,
        Some(0xd8..=0xdb) => counts.lds = 1,
        Some(0xdc..=0xe3 | 0xe8..=0xeb) => counts.global = 1,
        Some(0xf4..=0xf7) => counts.scalar_loads = 1,
        _ => {}
    }
    counts
}

/// How an instruction is encoded, at the end of its name.
const ENCODINGS: [&str; 7] = ["e32", "e64", "dpp", "dpp8", "dpp16", "sdwa", "vi"];

/// `v_OPERATION_f32`; `fma_mix` of f16 and f32 among them. (`v_mad_u32_u24` and its like are whole-number arithmetic.)
const MULTIPLY_ADDS: [&str; 8] = [
    "fma", "fmac", "fmamk", "fmaak", "mad", "mac", "madmk", "madak",
];

/// Those that take a quarter of the rate.
const TRANSCENDENTAL: [&str; 7] = ["exp", "log", "rcp", "rsq", "sqrt", "sin", "cos"];

/// Bytes that a `ds_…` instruction moves for one lane: `ds_read2_b32` moves two words, `ds_load_b128` four.
fn ds_bytes(words: &[&str]) -> u32 {
    let each = match words.last() {
        Some(&("u8" | "i8" | "b8")) => 1,
        Some(&("u16" | "i16" | "b16")) => 2,
        Some(&"b64") => 8,
        Some(&"b96") => 12,
        Some(&"b128") => 16,
        // `…_u8_d16` and its like end with where the bytes go.
        Some(&("d16" | "hi")) => 2,
        _ => 4,
    };
    let operation = words.get(1).copied().unwrap_or_default();
    let two = operation.ends_with('2') || operation.ends_with("2st64") || words.contains(&"2addr");
    each * if two { 2 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written for these tests: RDNA 2 names, a loop, a jump forward, encodings behind semicolons.
    const RDNA2: &str = "
BB0:
\ts_load_dwordx4 s[4:7], s[2:3], 0x10                 ; f4080101 fa000010
\tv_mov_b32_e32 v8, 0                                 ; 7e100280
\ts_cbranch_scc0 BB3                                  ; bf840010
BB1:
\tds_read_b128 v[0:3], v20                            ; dbfc0000 00000014
\tds_read2_b32 v[4:5], v21 offset0:1 offset1:9        ; d8dc0901 04000015
\ts_waitcnt lgkmcnt(0)                                ; bf8cc07f
\tv_fmac_f32_e32 v8, v0, v4                           ; 56100900
\tv_fma_f32 v9, v1, v4, v9                            ; d54b0009 04260901
\tv_fmamk_f32 v10, v2, 0x3fb8aa3b, v5                 ; 58140b02 3fb8aa3b
\tv_fmaak_f32 v11, v3, v5, 0x40000000                 ; 5a160b03 40000000
\tv_pk_fma_f16 v12, v0, v1, v12                       ; cc0e400c 1c320300
\tv_fma_mix_f32 v13, v0, v1, v13                      ; cc20000d 04360300
\tv_mad_u32_u24 v14, v0, v1, v14                      ; d543000e 043a0300
\tv_exp_f32_e32 v15, v15                              ; 7e1e4b0f
\tv_div_fmas_f32 v16, v0, v1, v2                      ; d56f0010 040a0300
\tds_bpermute_b32 v17, v18, v19                       ; dacc0000 11001312
\ts_cbranch_scc1 BB1                                  ; bf85fff0
BB2:
\tbuffer_gl0_inv                                      ; e1c40000 00000000
\tds_write_b64 v20, v[0:1]                            ; d9340000 00000014
\tbuffer_store_dword v8, v9, s[4:7], 0 offen          ; e0701000 80010809
BB3:
\ts_endpgm                                            ; bf810000
";

    #[test]
    fn rdna2_names_are_counted() {
        let program = read(RDNA2);
        assert_eq!(program.unknown, Vec::<String>::new());
        let labels: Vec<_> = program
            .blocks
            .iter()
            .map(|block| (block.label.as_str(), block.depth))
            .collect();
        assert_eq!(labels, [("BB0", 0), ("BB1", 1), ("BB2", 0), ("BB3", 0)]);
        let expected = Counts {
            multiply_adds: 7, // fmac, fma, fmamk, fmaak, fma_mix one each; the packed one two
            multiply_add_operations: 6,
            transcendental: 1,
            other_vector: 2, // whole numbers, and a step of a division
            lds: 2,
            lds_bytes: 16 + 8,
            lane_exchanges: 1,
            scalar: 2,
            ..Counts::default()
        };
        assert_eq!(program.blocks[1].counts, expected);
        assert_eq!(expected.vector(), 9);
        assert_eq!(expected.share(), Some(6.0 / 9.0));
        assert_eq!(expected.multiply_adds_per_lds(), Some(3.5));
        let expected = Counts {
            lds: 1,
            lds_bytes: 8,
            global: 1,
            scalar: 1,
            ..Counts::default()
        };
        assert_eq!(program.blocks[2].counts, expected);
        assert_eq!(program.total().scalar_loads, 1);
    }

    #[test]
    fn rdna3_names_are_counted() {
        let program = read(
            "BB4:
\tds_load_b128 v[0:3], v20
\tds_load_2addr_b64 v[4:7], v21 offset1:4
\tds_store_b16 v20, v9
\tv_dual_fmac_f32 v8, v0, v4 :: v_dual_fmac_f32 v9, v1, v4
\tv_dual_mul_f32 v8, v0, v4 :: v_dual_fmaak_f32 v9, v1, v4, 0x3f800000
\tv_dot2_f32_f16 v10, v0, v1, v10
\tv_dot2acc_f32_f16 v10, v0, v1
\tv_wmma_f32_16x16x16_f16 v[24:31], v[8:15], v[16:23], v[24:31]
\tv_sqrt_f32_e32 v1, v1
\tglobal_load_b32 v1, v[2:3], off
\tscratch_store_b32 off, v1, s32
\ts_delay_alu instid0(VALU_DEP_1)
\ts_branch BB4
",
        );
        assert_eq!(program.unknown, Vec::<String>::new());
        let expected = Counts {
            multiply_adds: 3,
            multiply_add_operations: 3,
            dots: 2,
            matrices: 1,
            transcendental: 1,
            other_vector: 1,
            lds: 3,
            lds_bytes: 16 + 16 + 2,
            global: 1,
            scratch: 1,
            scalar: 2,
            ..Counts::default()
        };
        assert_eq!(
            program.blocks,
            [Block {
                label: "BB4".into(),
                depth: 1,
                counts: expected
            }]
        );
        assert_eq!(expected.share(), Some(6.0 / 8.0));
        assert_eq!(expected.multiply_adds_per_lds(), Some(7.0 / 3.0));
    }

    #[test]
    fn nothing_divided_by_nothing_is_no_number() {
        assert_eq!(Counts::default().share(), None);
        assert_eq!(Counts::default().multiply_adds_per_lds(), None);
    }

    #[test]
    fn bytes_of_workgroup_memory_are_those_moved() {
        let cases = [
            ("ds_read_u8", 1),
            ("ds_load_u16_d16_hi", 2),
            ("ds_read_u16_d16", 2),
            ("ds_write_b16", 2),
            ("ds_read_b32", 4),
            ("ds_write2_b32", 8),
            ("ds_read2st64_b32", 8),
            ("ds_load_2addr_stride64_b32", 8),
            ("ds_store_b96", 12),
            ("ds_write_b128", 16),
            ("ds_read2_b64", 16),
            ("ds_add_u32", 4),
        ];
        for (mnemonic, bytes) in cases {
            let counts = count(mnemonic).unwrap_or_default();
            assert_eq!((counts.lds, counts.lds_bytes), (1, bytes), "{mnemonic}");
        }
    }

    #[test]
    fn whole_number_arithmetic_is_no_multiply_add() {
        for mnemonic in [
            "v_mad_u32_u24",
            "v_mad_u64_u32",
            "v_mad_i32_i24_e64",
            "v_mul_f32_e32",
            "v_cmp_lt_f32_e64",
            "v_add_f32_dpp",
        ] {
            let expected = Counts {
                other_vector: 1,
                ..Counts::default()
            };
            assert_eq!(count(mnemonic), Some(expected), "{mnemonic}");
        }
        for mnemonic in [
            "v_mac_f32_e32",
            "v_mad_f32",
            "v_fmac_f16_sdwa",
            "v_fma_mixlo_f16",
            "v_fmac_f32_dpp",
            "v_fma_f64",
        ] {
            let expected = Counts {
                multiply_adds: 1,
                multiply_add_operations: 1,
                ..Counts::default()
            };
            assert_eq!(count(mnemonic), Some(expected), "{mnemonic}");
        }
    }

    #[test]
    fn what_is_not_known_is_not_lost() {
        let program = read(
            "BB0:\n\tq_frobnicate v0\n\tv_mov_b32_e32 v0, 0\n(invalid instruction)  ; f4281a06\n\texp mrtz off ; f8\n\
             (invalid instruction)  ; 7f26390c\n(invalid instruction)  ; e0500000\n(invalid instruction)  ; d8dc0901\n",
        );
        assert_eq!(program.unknown, ["q_frobnicate v0"]);
        assert_eq!(program.unnamed, 4);
        let expected = Counts {
            other_vector: 2,
            scalar_loads: 1,
            global: 1,
            lds: 1,
            ..Counts::default()
        };
        assert_eq!(program.total(), expected);
    }

    #[test]
    fn repeated_lines_count_as_often_as_they_stand() {
        let program =
            read("BB0:\n\tv_fmac_f32 v0, v1, v2\n\t(then repeated 3 times)\nBB1:\n\ts_endpgm\n");
        assert_eq!(program.unknown, Vec::<String>::new());
        assert_eq!(program.blocks[0].counts.multiply_adds, 4);
        assert_eq!(read("\t(then repeated 3 times)\n").unknown.len(), 1);
    }

    #[test]
    fn loops_inside_loops_are_deeper() {
        let program = read(
            "BB0:\n\ts_nop 0\nBB1:\n\ts_nop 0\nBB2:\n\ts_cbranch_vccnz BB2\nBB3:\n\ts_cbranch_scc0 BB5\n\ts_branch BB1\n\
             BB4:\n\ts_branch BB1\nBB5:\n\ts_endpgm\n",
        );
        let depths: Vec<u32> = program.blocks.iter().map(|block| block.depth).collect();
        assert_eq!(
            depths,
            [0, 1, 2, 1, 1, 0],
            "two jumps back to BB1 close one loop"
        );
    }

    #[test]
    fn hot_blocks_are_the_largest_of_loops_in_order() {
        let block = |multiply_adds| "\tv_fmac_f32 v0, v1, v2\n".repeat(multiply_adds);
        let listing = format!(
            "BB0:\n{}BB1:\n{}\ts_branch BB1\nBB2:\n{}\ts_branch BB2\nBB3:\n{}\ts_branch BB3\nBB4:\n{}\ts_branch BB4\nBB5:\n{}\ts_branch BB5\n",
            block(100),
            block(16),
            block(9),
            block(64),
            block(3),
            block(9)
        );
        let hot = |listing: &str| -> Vec<String> {
            read(listing)
                .hot()
                .iter()
                .map(|block| block.label.clone())
                .collect()
        };
        assert_eq!(
            hot(&listing),
            ["BB1", "BB2", "BB3"],
            "no loop around BB0; the first of two alike"
        );
        assert_eq!(
            hot(&format!("BB0:\n{}\ts_branch BB0\n", block(3))),
            Vec::<String>::new()
        );
    }
}
