"""Which calls are paired: rules by falling strictness, on names, structure, data flow, content."""
