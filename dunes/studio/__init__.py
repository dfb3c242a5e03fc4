"""A page in the browser that shows runs and models: `app.build` makes the application, `cli.studio` serves it.

Views whose names end in `_page` draw; the other modules compute what is drawn, and know no NiceGUI.
"""
