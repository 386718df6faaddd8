// The page of one run: it is written out already, and only the theme is the reader's to choose.
document.getElementById("theme").addEventListener("click", switchTheme);
