//! CSV as the public traces use it: a header, fields split at commas, perhaps in double quotes,
//! never a line break inside a field. Splitting by line keeps line and column numbers exact.

use super::{Column, Fault, Line, MAX_REQUEST_TOKENS, Problem};

/// Names of the columns, in the order of the file.
#[derive(Debug)]
pub(super) struct Header<'a> {
    names: Vec<&'a str>,
}

/// Where one named column is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    index: usize,
    name: &'a str,
}

/// One field of one line.
#[derive(Debug, Clone, Copy)]
pub(super) struct Field<'a> {
    pub(super) text: &'a str,
    place: Place<'a>,
    line: usize,
}

impl<'a> Header<'a> {
    pub(super) fn parse(line: &'a str) -> Self {
        Self {
            names: line.split(',').map(unquoted).collect(),
        }
    }

    /// The column called `name`, in any capitals.
    pub(super) fn find(&self, name: &str) -> Option<Place<'a>> {
        let index = self
            .names
            .iter()
            .position(|found| found.eq_ignore_ascii_case(name))?;
        Some(Place {
            index,
            name: self.names[index],
        })
    }
}

impl<'a> Place<'a> {
    /// This column's field of `line`; a line that ends before it is cut off.
    pub(super) fn field(self, line: Line<'a>) -> Result<Field<'a>, Fault> {
        let text = line.text.split(',').nth(self.index).map(unquoted);
        let field = Field {
            text: text.unwrap_or_default(),
            place: self,
            line: line.number,
        };
        if text.is_none() {
            return Err(field.fault_found("a value", "the end of the line".to_owned()));
        }
        Ok(field)
    }
}

impl Field<'_> {
    /// A count of tokens.
    pub(super) fn tokens(self) -> Result<u32, Fault> {
        let digits = !self.text.is_empty() && self.text.bytes().all(|b| b.is_ascii_digit());
        match self.text.parse::<u32>() {
            Ok(tokens) if digits && tokens <= MAX_REQUEST_TOKENS => Ok(tokens),
            _ => Err(self.fault(&expected_tokens())),
        }
    }

    /// The field does not hold what is expected.
    pub(super) fn fault(self, expected: &str) -> Fault {
        let found = if self.text.is_empty() {
            "nothing".to_owned()
        } else {
            format!("\"{}\"", self.text.chars().take(80).collect::<String>())
        };
        self.fault_found(expected, found)
    }

    fn fault_found(self, expected: &str, found: String) -> Fault {
        Fault {
            line: self.line,
            column: Some(Column {
                number: self.place.index + 1,
                name: Some(self.place.name.to_owned()),
            }),
            problem: Problem::Value {
                expected: expected.to_owned(),
                found,
            },
        }
    }
}

pub(super) fn expected_tokens() -> String {
    format!("a whole number of tokens from 0 to {MAX_REQUEST_TOKENS}")
}

fn unquoted(field: &str) -> &str {
    let field = field.trim();
    field
        .strip_prefix('"')
        .and_then(|inner| inner.strip_suffix('"'))
        .unwrap_or(field)
        .trim()
}
