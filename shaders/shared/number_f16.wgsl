// What a peak is measured in.
enable f16;
alias Number = f16;
