"""What each subcommand does with its options; importing them loads no torch."""
