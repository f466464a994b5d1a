"""The book: the chapters as a static site, with what a page can show and a notebook cannot.

    make book                              # book/_build/html
    make book REPOSITORY=owner/name        # with links to Colab, Kaggle and the source

- `chapter` turns a notebook into a page, `exercises` and `listings` make pages of their own from
  the course's modules, and `glossary` reads `glossary.md` and marks its terms.
- `__main__` writes these pages to `_build/pages` and has Sphinx (`conf.py`) build the site.

The notebooks are read, and never written. Nothing in them is run.
"""
