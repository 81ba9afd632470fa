//! Lines of a CSV by the names of their columns. Each line is a record of its own, as in all public
//! traces (no line break inside a field), so that line and column numbers are exact.

use csv::{ReaderBuilder, StringRecord, Trim};

use super::{Column, Fault, Line, MAX_REQUEST_TOKENS, Problem};

/// Names of the columns, in the order of the file.
#[derive(Debug)]
pub(super) struct Header {
    names: StringRecord,
}

/// Where one named column is.
#[derive(Debug, Clone)]
pub(super) struct Place {
    index: usize,
    name: String,
}

/// One line after the header.
#[derive(Debug)]
pub(super) struct Row {
    fields: StringRecord,
    number: usize,
}

/// One field of one line.
#[derive(Debug, Clone, Copy)]
pub(super) struct Field<'a> {
    pub(super) text: &'a str,
    place: &'a Place,
    line: usize,
}

impl Header {
    pub(super) fn parse(line: &str) -> Self {
        Self {
            names: record(line),
        }
    }

    /// The column called `name`, in any capitals.
    pub(super) fn find(&self, name: &str) -> Option<Place> {
        let index = self
            .names
            .iter()
            .position(|found| found.eq_ignore_ascii_case(name))?;
        Some(Place {
            index,
            name: self.names[index].to_owned(),
        })
    }
}

impl Row {
    pub(super) fn parse(line: Line<'_>) -> Self {
        Self {
            fields: record(line.text),
            number: line.number,
        }
    }
}

impl Place {
    /// This column's field of `row`; a line that ends before it is cut off.
    pub(super) fn field<'a>(&'a self, row: &'a Row) -> Result<Field<'a>, Fault> {
        let text = row.fields.get(self.index);
        let field = Field {
            text: text.unwrap_or_default(),
            place: self,
            line: row.number,
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

/// The fields of one line. One that cannot be split, or that a lone carriage return makes two
/// records of, has none, and so lacks every column.
fn record(line: &str) -> StringRecord {
    // A parser costs far more to make than such a line costs to split, and a trace has millions.
    if !line.contains(['"', '\r']) {
        return line.split(',').map(str::trim).collect();
    }
    parsed(line)
}

fn parsed(line: &str) -> StringRecord {
    let mut reader = ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .trim(Trim::All)
        // One record is read; the default buffer is made for whole files.
        .buffer_capacity(line.len().max(1))
        .from_reader(line.as_bytes());
    let (mut record, mut more) = (StringRecord::new(), StringRecord::new());
    match (
        reader.read_record(&mut record),
        reader.read_record(&mut more),
    ) {
        (Ok(_), Ok(false)) => record,
        _ => StringRecord::new(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_plain_line_is_split_as_the_parser_splits_it(line in "[a, .\t;'é-]{1,30}") {
            prop_assume!(!line.trim().is_empty());
            prop_assert_eq!(record(line.trim()), parsed(line.trim()));
        }
    }
}
