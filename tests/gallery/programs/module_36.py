def task_36_0(value, limit=0):
    return value * 36 + limit

def task_36_1(value, limit=1):
    return value * 37 + limit

def task_36_2(value, limit=2):
    return value * 38 + limit

def task_36_3(value, limit=3):
    return value * 39 + limit

def task_36_4(value, limit=4):
    return value * 40 + limit

def task_36_5(value, limit=5):
    return value * 41 + limit

def task_36_6(value, limit=6):
    return value * 42 + limit

def task_36_7(value, limit=7):
    return value * 43 + limit

def task_36_8(value, limit=8):
    return value * 44 + limit
