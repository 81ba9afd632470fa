#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvcached_fuzz::burst(bytes));
