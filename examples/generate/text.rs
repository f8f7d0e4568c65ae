//! Tokens and what they stand for; and the choice of the next one.

use crate::Result;
use wgpu_attention::tensor_file::TensorFile;

/// What tokens stand for: characters, or bytes.
pub(crate) enum Vocabulary {
    Characters(Vec<char>),
    Bytes,
}

impl Vocabulary {
    /// As the file's metadata say in `vocab`, a string of one character a token.
    pub(crate) fn of(file: &TensorFile, size: usize) -> Result<Self> {
        let own = match file.metadata().get("vocab") {
            Some(vocab) => Vocabulary::Characters(vocab.chars().collect()),
            None => Vocabulary::Bytes,
        };
        if own.size() == size {
            return Ok(own);
        }
        Err(format!(
            "{}: expected {} tokens, {}, got {size} rows of wte.weight; this example knows characters and bytes only",
            file.path().display(),
            own.size(),
            match own {
                Vocabulary::Characters(_) => "the characters of `vocab` in its metadata",
                Vocabulary::Bytes => "bytes, since its metadata have no `vocab`",
            }
        )
        .into())
    }

    pub(crate) fn size(&self) -> usize {
        match self {
            Vocabulary::Characters(characters) => characters.len(),
            Vocabulary::Bytes => 256,
        }
    }

    pub(crate) fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        let Vocabulary::Characters(known) = self else {
            return Ok(text.bytes().map(u32::from).collect());
        };
        let token = |own: char| match known.iter().position(|other| *other == own) {
            Some(token) => Ok(token as u32),
            None => Err(format!("the model does not know {own:?}: choose another --prompt").into()),
        };
        text.chars().map(token).collect()
    }

    pub(crate) fn text(&self, tokens: &[u32]) -> String {
        let text = match self {
            Vocabulary::Characters(known) => tokens.iter().map(|t| known[*t as usize]).collect(),
            Vocabulary::Bytes => {
                let bytes: Vec<u8> = tokens.iter().map(|token| *token as u8).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
        };
        // What would steer the terminal is spelled out.
        let shown = |own: char| match own.is_control() && own != '\n' {
            true => own.escape_default().to_string(),
            false => own.to_string(),
        };
        text.chars().map(shown).collect()
    }
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// 0 to 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// A token, each as likely as softmax of the logits says.
    pub(crate) fn draw(&mut self, logits: &[f32]) -> u32 {
        let most = logits.iter().fold(f32::MIN, |most, logit| most.max(*logit));
        let weights: Vec<f32> = logits.iter().map(|logit| (logit - most).exp()).collect();
        let mut left = self.unit() * weights.iter().sum::<f32>();
        for (token, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return token as u32;
            }
        }
        // What rounding left over.
        logits.len() as u32 - 1
    }
}
