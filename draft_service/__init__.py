"""The draft service: guesses tokens with a SPIRe draft in constant memory per sequence."""
