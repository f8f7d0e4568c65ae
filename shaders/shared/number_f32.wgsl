// What a peak is measured in.
alias Number = f32;
