//! What the driver made of each configuration, as tables or as JSON.

use crate::assembly::{self, Block, Counts, Program};
use crate::driver::Compiled;
use crate::known::Known;
use serde_json::{Value, json};

/// A configuration, compiled.
pub(crate) struct Row {
    /// The kernel's name, or the entry point of a file.
    pub(crate) kernel: String,
    /// What is said beside its name.
    pub(crate) remark: &'static str,
    /// The rules that are linked in.
    pub(crate) rules: String,
    /// What else specialises it.
    pub(crate) configuration: String,
    /// Whether it is known to spill.
    pub(crate) known: Option<&'static Known>,
    /// What came of it.
    pub(crate) figures: Figures,
}

/// What the driver says of a pipeline, and what its assembly says.
pub(crate) struct Figures {
    pub(crate) wave: u32,
    pub(crate) vgprs: u64,
    pub(crate) sgprs: u64,
    pub(crate) spilled_vgprs: u64,
    pub(crate) spilled_sgprs: u64,
    /// Bytes a wave.
    pub(crate) scratch: u64,
    /// Bytes of workgroup memory that the driver sets aside.
    pub(crate) lds: u64,
    pub(crate) waves_per_simd: u64,
    /// Bytes.
    pub(crate) code: u64,
    pub(crate) program: Program,
}

impl Figures {
    /// # Errors
    ///
    /// What the driver does not report, or what of its listing cannot be read.
    pub(crate) fn of(compiled: &Compiled) -> Result<Figures, String> {
        let program = assembly::read(&compiled.assembly);
        if program.total().vector() == 0 {
            return Err("the driver gave no assembly that can be read: its Mesa may be built without a disassembler".into());
        }
        if let Some(line) = program.unknown.first() {
            let number = program.unknown.len();
            return Err(format!(
                "{number} lines of the driver's assembly cannot be read, the first is {line:?}"
            ));
        }
        Ok(Figures {
            wave: compiled.wave,
            vgprs: compiled.statistic("VGPRs")?,
            sgprs: compiled.statistic("SGPRs")?,
            spilled_vgprs: compiled.statistic("Spilled VGPRs")?,
            spilled_sgprs: compiled.statistic("Spilled SGPRs")?,
            scratch: compiled.statistic("Scratch size")?,
            lds: compiled.statistic("LDS size")?,
            waves_per_simd: compiled.statistic("Subgroups per SIMD")?,
            code: compiled.statistic("Code size")?,
            program,
        })
    }

    /// Whether it keeps all it works with in registers and workgroup memory.
    pub(crate) fn fits(&self) -> bool {
        self.spilled_vgprs == 0 && self.spilled_sgprs == 0 && self.scratch == 0
    }

    /// Whether the only registers that did not suffice are SGPRs.
    pub(crate) fn spills_sgprs_only(&self) -> bool {
        self.spilled_vgprs == 0 && self.scratch == 0 && self.spilled_sgprs > 0
    }

    /// What does not fit, in words.
    pub(crate) fn spills(&self) -> String {
        let parts = [
            (self.spilled_vgprs, "VGPRs"),
            (self.spilled_sgprs, "SGPRs"),
            (self.scratch, "bytes of scratch"),
        ];
        let parts: Vec<String> = parts
            .iter()
            .filter(|(number, _)| *number > 0)
            .map(|(number, what)| format!("{number} {what}"))
            .collect();
        if parts.is_empty() {
            "nothing".into()
        } else {
            parts.join(", ")
        }
    }
}

/// All that was compiled for one GPU.
pub(crate) struct Report {
    /// `RDNA 2 (navi21)`.
    pub(crate) gpu: String,
    /// Versions and options, a sentence.
    pub(crate) made_by: String,
    pub(crate) rows: Vec<Row>,
}

impl Report {
    /// Markdown: a section for the GPU, a table for each kernel and set of rules.
    pub(crate) fn markdown(&self) -> String {
        let mut text = format!("## {}\n\n{}\n", self.gpu, self.made_by);
        let mut rest = &self.rows[..];
        let mut kernel = "";
        while let Some(first) = rest.first() {
            let alike = rest
                .iter()
                .take_while(|row| row.kernel == first.kernel && row.rules == first.rules)
                .count();
            let (rows, after) = rest.split_at(alike);
            if first.kernel != kernel {
                text += &format!("\n### {}{}\n", first.kernel, first.remark);
                kernel = &first.kernel;
            }
            text += &format!("\n{}\n\n{}", in_common(rows), table(rows));
            let unnamed = rows
                .iter()
                .map(|row| row.figures.program.unnamed)
                .max()
                .unwrap_or(0);
            if unnamed > 0 {
                text += &format!(
                    "\nThe driver's disassembler could not name some instructions, at most {unnamed} of a configuration: they are counted by their encoding, as no multiply-adds.\n"
                );
            }
            rest = after;
        }
        text
    }

    /// Everything, every block among it.
    pub(crate) fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(row_json).collect();
        json!({ "gpu": self.gpu, "made_by": self.made_by, "kernels": rows })
    }
}

/// A column that is a column only where its values differ; else it is said once, above the table.
struct Common {
    head: &'static str,
    value: fn(&Figures) -> String,
    sentence: fn(&Figures) -> String,
}

const COMMON: [Common; 3] = [
    Common {
        head: "wave",
        value: |figures| figures.wave.to_string(),
        sentence: |figures| format!("waves of {} lanes", figures.wave),
    },
    Common {
        head: "SGPRs",
        value: |figures| figures.sgprs.to_string(),
        sentence: |figures| format!("{} SGPRs", figures.sgprs),
    },
    Common {
        head: "spilled",
        value: Figures::spills,
        sentence: |figures| {
            if figures.fits() {
                "nothing spilled, no scratch".into()
            } else {
                format!("spilled: {}", figures.spills())
            }
        },
    },
];

impl Common {
    fn differs(&self, rows: &[Row]) -> bool {
        rows.windows(2)
            .any(|two| (self.value)(&two[0].figures) != (self.value)(&two[1].figures))
    }
}

/// A column of hot blocks that is left out where it has nothing to say.
struct Rare {
    head: &'static str,
    value: fn(&Counts) -> u32,
}

const RARE: [Rare; 4] = [
    Rare {
        head: "dot2",
        value: |counts| counts.dots,
    },
    Rare {
        head: "wmma",
        value: |counts| counts.matrices,
    },
    Rare {
        head: "lane exchanges",
        value: |counts| counts.lane_exchanges,
    },
    Rare {
        head: "scratch accesses",
        value: |counts| counts.scratch,
    },
];

fn in_common(rows: &[Row]) -> String {
    let mut words: Vec<String> = Vec::new();
    for (row, common) in rows
        .iter()
        .take(1)
        .flat_map(|row| COMMON.iter().map(move |common| (row, common)))
    {
        if !common.differs(rows) {
            words.push((common.sentence)(&row.figures));
        }
    }
    let rules = rows.first().map_or("", |row| row.rules.as_str());
    let rules = if rules.is_empty() {
        String::new()
    } else {
        format!("Rules {rules}. ")
    };
    let mut sentence = words.join(", ");
    if let Some(first) = sentence.get(..1).map(str::to_uppercase) {
        sentence.replace_range(..1, &first);
        sentence.push('.');
    }
    format!("{rules}{sentence}")
}

fn table(rows: &[Row]) -> String {
    let commons: Vec<&Common> = COMMON
        .iter()
        .filter(|common| common.differs(rows))
        .collect();
    let blocks = || rows.iter().flat_map(|row| row.figures.program.hot());
    let rares: Vec<&Rare> = RARE
        .iter()
        .filter(|rare| blocks().any(|block| (rare.value)(&block.counts) > 0))
        .collect();
    let has_names = rows.iter().any(|row| !row.configuration.is_empty());

    let mut heads: Vec<&str> = Vec::new();
    if has_names {
        heads.push("configuration");
    }
    heads.push("VGPRs");
    heads.extend(commons.iter().map(|common| common.head));
    heads.extend(["LDS bytes", "waves", "code bytes"]);
    let own = heads.len();
    if blocks().next().is_some() {
        heads.extend([
            "hot block",
            "multiply-adds",
            "other vector",
            "transcendental",
            "LDS",
            "global",
        ]);
        heads.extend(rares.iter().map(|rare| rare.head));
        heads.extend(["share", "per LDS"]);
    }

    let mut lines: Vec<Vec<String>> = Vec::new();
    for row in rows {
        let figures = &row.figures;
        let mut cells: Vec<String> = Vec::new();
        if has_names {
            cells.push(row.configuration.clone());
        }
        cells.push(figures.vgprs.to_string());
        cells.extend(commons.iter().map(|common| (common.value)(figures)));
        cells.extend(
            [figures.lds, figures.waves_per_simd, figures.code].map(|number| number.to_string()),
        );
        let hot = figures.program.hot();
        if hot.is_empty() {
            cells.resize(heads.len(), String::new());
            lines.push(cells);
            continue;
        }
        for (nth, block) in hot.into_iter().enumerate() {
            let mut line = if nth == 0 {
                cells.clone()
            } else {
                vec![String::new(); own]
            };
            line.extend(block_cells(block, &rares));
            lines.push(line);
        }
    }
    markdown_table(&heads, &lines, usize::from(has_names))
}

fn block_cells(block: &Block, rares: &[&Rare]) -> Vec<String> {
    let counts = &block.counts;
    let mut cells = vec![block.label.clone()];
    let numbers = [
        counts.multiply_adds,
        counts.other_vector,
        counts.transcendental,
        counts.lds,
        counts.global,
    ];
    cells.extend(numbers.map(|number| number.to_string()));
    cells.extend(rares.iter().map(|rare| (rare.value)(counts).to_string()));
    cells.push(
        counts
            .share()
            .map_or_else(String::new, |share| format!("{:.0} %", 100.0 * share)),
    );
    cells.push(
        counts
            .multiply_adds_per_lds()
            .map_or_else(String::new, |number| format!("{number:.1}")),
    );
    cells
}

/// A table whose columns line up in the text too. The first `left` of them are words.
fn markdown_table(heads: &[&str], lines: &[Vec<String>], left: usize) -> String {
    let widths: Vec<usize> = heads
        .iter()
        .enumerate()
        .map(|(column, head)| {
            let cells = lines
                .iter()
                .filter_map(|line| line.get(column))
                .map(String::len);
            cells.chain([head.len(), 3]).max().unwrap_or(3)
        })
        .collect();
    let write = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::from("|");
        for (column, (cell, width)) in cells.zip(&widths).enumerate() {
            if column < left {
                text += &format!(" {cell:<width$} |");
            } else {
                text += &format!(" {cell:>width$} |");
            }
        }
        text + "\n"
    };
    let mut text = write(&mut heads.iter().copied());
    text += "|";
    for (column, width) in widths.iter().enumerate() {
        let dashes = "-".repeat(width - usize::from(column >= left));
        text += &if column < left {
            format!(" {dashes} |")
        } else {
            format!(" {dashes}: |")
        };
    }
    text += "\n";
    for line in lines {
        text += &write(&mut line.iter().map(String::as_str));
    }
    text
}

fn row_json(row: &Row) -> Value {
    let figures = &row.figures;
    let hot: Vec<&str> = figures
        .program
        .hot()
        .into_iter()
        .map(|block| block.label.as_str())
        .collect();
    let blocks: Vec<Value> = figures
        .program
        .blocks
        .iter()
        .map(|block| {
            let mut value = counts_json(&block.counts);
            value["label"] = json!(block.label);
            value["loops_around"] = json!(block.depth);
            value["hot"] = json!(hot.contains(&block.label.as_str()));
            value
        })
        .collect();
    json!({
        "kernel": row.kernel,
        "configuration": row.configuration,
        "rules": row.rules,
        "wave_lanes": figures.wave,
        "vgprs": figures.vgprs,
        "sgprs": figures.sgprs,
        "spilled_vgprs": figures.spilled_vgprs,
        "spilled_sgprs": figures.spilled_sgprs,
        "scratch_bytes": figures.scratch,
        "lds_bytes": figures.lds,
        "waves_per_simd": figures.waves_per_simd,
        "code_bytes": figures.code,
        "unnamed_instructions": figures.program.unnamed,
        "total": counts_json(&figures.program.total()),
        "blocks": blocks,
    })
}

fn counts_json(counts: &Counts) -> Value {
    json!({
        "multiply_adds": counts.multiply_adds,
        "multiply_add_operations": counts.multiply_add_operations,
        "dots": counts.dots,
        "matrices": counts.matrices,
        "transcendental": counts.transcendental,
        "other_vector": counts.other_vector,
        "lds": counts.lds,
        "lds_bytes": counts.lds_bytes,
        "lane_exchanges": counts.lane_exchanges,
        "global": counts.global,
        "scratch": counts.scratch,
        "scalar_loads": counts.scalar_loads,
        "scalar": counts.scalar,
        "share": counts.share(),
        "multiply_adds_per_lds": counts.multiply_adds_per_lds(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(configuration: &str, spilled_sgprs: u64, listing: &str) -> Row {
        Row {
            kernel: "sample".into(),
            remark: "",
            rules: "rows".into(),
            configuration: configuration.into(),
            known: None,
            figures: Figures {
                wave: 64,
                vgprs: 24,
                sgprs: 128,
                spilled_vgprs: 0,
                spilled_sgprs,
                scratch: 0,
                lds: 512,
                waves_per_simd: 16,
                code: 100,
                program: assembly::read(listing),
            },
        }
    }

    const LOOP: &str = "BB0:\n\ts_nop 0\nBB1:\n\tds_read_b32 v0, v1\n\tv_fmac_f32 v0, v1, v2\n\t(then repeated 11 times)\n\
                        \tv_mov_b32 v0, 0\n\ts_branch BB1\n";

    #[test]
    fn what_rows_have_in_common_is_said_once() {
        let report = Report {
            gpu: "RDNA 2 (navi21)".into(),
            made_by: "Mesa 1.2.3.".into(),
            rows: vec![
                row("ROWS=1", 0, LOOP),
                row("ROWS=2", 0, "\tv_mov_b32 v0, 0\n"),
            ],
        };
        assert_eq!(
            report.markdown(),
            "\
## RDNA 2 (navi21)

Mesa 1.2.3.

### sample

Rules rows. Waves of 64 lanes, 128 SGPRs, nothing spilled, no scratch.

| configuration | VGPRs | LDS bytes | waves | code bytes | hot block | multiply-adds | other vector | transcendental | LDS | global | share | per LDS |
| ------------- | ----: | --------: | ----: | ---------: | --------: | ------------: | -----------: | -------------: | --: | -----: | ----: | ------: |
| ROWS=1        |    24 |       512 |    16 |        100 |       BB1 |            12 |            1 |              0 |   1 |      0 |  92 % |    12.0 |
| ROWS=2        |    24 |       512 |    16 |        100 |           |               |              |                |     |        |       |         |
"
        );
    }

    #[test]
    fn what_differs_is_a_column() {
        let report = Report {
            gpu: "a".into(),
            made_by: "b".into(),
            rows: vec![row("ROWS=1", 0, LOOP), row("ROWS=2", 7, LOOP)],
        };
        let text = report.markdown();
        assert!(
            text.contains("Rules rows. Waves of 64 lanes, 128 SGPRs.\n"),
            "{text}"
        );
        assert!(
            text.contains("| ROWS=2        |    24 | 7 SGPRs |"),
            "{text}"
        );
        assert_eq!(report.json()["kernels"][1]["spilled_sgprs"], 7);
        assert_eq!(
            report.json()["kernels"][0]["blocks"][1]["multiply_adds"],
            12
        );
    }

    #[test]
    fn spills_are_said_in_words() {
        let mut figures = row("", 0, LOOP).figures;
        assert!(figures.fits() && !figures.spills_sgprs_only());
        assert_eq!(figures.spills(), "nothing");
        figures.spilled_sgprs = 3;
        assert!(!figures.fits() && figures.spills_sgprs_only());
        figures.scratch = 64;
        assert!(!figures.fits() && !figures.spills_sgprs_only());
        assert_eq!(figures.spills(), "3 SGPRs, 64 bytes of scratch");
    }
}
