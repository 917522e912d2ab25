"""What any program needs of the machine: files that appear whole, the terminal, signals, YAML, regular expressions."""
