//! `report`: one HTML page of one or more files of results.

use crate::compare::load;
use crate::{Verdict, complain, say};
use clap::Args;
use std::path::PathBuf;
use wgpu_attention::bench::{expect_writable, save};
use wgpu_attention::results::{labelled, report, report_charts};
use wgpu_attention::{Error, Result};

#[derive(Args)]
#[command(after_help = "\
The page holds its charts, needs no network and runs no script: it can be sent or kept as it is. Charts show what two or more runs have in \
common; files of several machines make a comparison of their adapters. docs/benchmarking.md says what the figures mean.")]
pub(crate) struct Options {
    /// What `bench` saved
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The page
    #[arg(short, long, value_name = "PAGE.html", default_value = "report.html")]
    output: PathBuf,
    /// Also write each chart as an SVG file into this folder, which is made if it is not there
    #[arg(long, value_name = "FOLDER")]
    svg: Option<PathBuf>,
    /// Replace files that are there
    #[arg(long)]
    force: bool,
}

pub(crate) fn run(options: &Options) -> Result<Verdict> {
    expect_writable(&options.output, options.force)?;
    let same = |file: &PathBuf| match (file.canonicalize(), options.output.canonicalize()) {
        (Ok(file), Ok(output)) => file == output,
        _ => false,
    };
    if let Some(file) = options.files.iter().find(|file| same(file)) {
        complain(format_args!(
            "{}: --output names a file of results; give it another name",
            file.display()
        ));
        return Ok(Verdict::Unsound);
    }
    let files = load(&options.files)?;
    let runs = labelled(&files);
    let mut charts = Vec::new();
    if let Some(folder) = &options.svg {
        std::fs::create_dir_all(folder).map_err(|source| Error::Io {
            path: folder.display().to_string(),
            source,
        })?;
        for (name, svg) in report_charts(&runs) {
            let path = folder.join(format!("{name}.svg"));
            expect_writable(&path, options.force)?;
            charts.push((path, svg));
        }
    }
    let is_input = |chart: &PathBuf| {
        let chart = chart.canonicalize().ok();
        let mut inputs = options.files.iter();
        chart.is_some() && inputs.any(|file| file.canonicalize().ok() == chart)
    };
    if let Some((path, _)) = charts.iter().find(|(path, _)| is_input(path)) {
        complain(format_args!(
            "{}: a file of results is named as a chart of --svg; give it another name",
            path.display()
        ));
        return Ok(Verdict::Unsound);
    }
    let absolute = |path: &PathBuf| std::path::absolute(path).ok();
    if charts
        .iter()
        .any(|(path, _)| absolute(path) == absolute(&options.output))
    {
        complain(format_args!(
            "{}: --output names a chart of --svg; give it another name",
            options.output.display()
        ));
        return Ok(Verdict::Unsound);
    }
    save(&options.output, &report(&runs), options.force)?;
    say(format_args!("written     {}", options.output.display()));
    for (path, svg) in &charts {
        save(path, svg, options.force)?;
    }
    if let Some(folder) = &options.svg {
        say(format_args!(
            "            {} charts in {}",
            charts.len(),
            folder.display()
        ));
    }
    Ok(Verdict::Right)
}
