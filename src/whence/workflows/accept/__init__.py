"""May an expectation be renewed? Expected values against actual ones, judged by evidence."""
