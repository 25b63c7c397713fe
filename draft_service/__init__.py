"""The draft service: proposes draft tokens; a SPIRe draft needs constant memory per sequence."""
