"""Where weights come from: files of several formats, translated to one naming."""
